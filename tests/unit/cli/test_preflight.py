"""Checks before the start: what cannot work is said in one line, with what to change."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from msgspec.structs import replace

from alignedserve.cluster import preflight
from alignedserve.config.sections import MIB, ClusterConfig, EngineConfig, ModelSectionConfig, Topology
from alignedserve.core.errors import AddressInUse, ConfigError, ModelError, ModelNotFound, NotEnoughMemory
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.harnesses.clusters.in_process import small_config
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_llama import TINY_LLAMA


class Free(NamedTuple):
    """Stands for the answer of `os.statvfs` for a memory file system."""

    f_bavail: int
    f_frsize: int = 1


POCKET = resolve_model(ModelSectionConfig())


def config(port: int, **sections: dict[str, Any]) -> ClusterConfig:
    made = ClusterConfig()
    made = replace(made, gateway=replace(made.gateway, port=port))
    return replace(made, **{name: replace(getattr(made, name), **changes) for name, changes in sections.items()})


def separate(port: int, **sections: dict[str, Any]) -> ClusterConfig:
    return replace(config(port, **sections), topology=Topology.DISAGGREGATED)


def one_context(served: ServedModel = POCKET) -> int:
    """Return the bytes of cache of the longest request, and a block."""
    return served.decoder.kv_token_bytes(served.dtype) * (served.max_context_len + 16)


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: tests say themselves what is short."""
    available(monkeypatch, 64 * 1024 * MIB)
    shared_memory(monkeypatch, 64 * 1024 * MIB)


def available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=size))


def shared_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("alignedserve.cluster.preflight.os.statvfs", lambda _: Free(size))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_the_defaults_can_work(unused_tcp_port: int) -> None:
    preflight.check(config(unused_tcp_port), POCKET)


# --- ports


def test_a_port_in_use_is_named_with_what_to_set(taken_port: int) -> None:
    with pytest.raises(AddressInUse, match=rf"127\.0\.0\.1:{taken_port} .*--port or --set gateway\.port=N"):
        preflight.check(config(taken_port), POCKET)


def test_every_gateway_needs_its_port(unused_tcp_port_factory: Callable[[], int]) -> None:
    with socket.socket() as second:
        while True:
            port = unused_tcp_port_factory()
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                break
        second.listen()
        with pytest.raises(AddressInUse, match=f":{port + 1} "):
            preflight.check(config(port, gateway={"port": port, "count": 2}), POCKET)


def test_a_host_that_is_not_ours(unused_tcp_port: int) -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on 192\.0\.2\.1"):
        preflight.check(config(unused_tcp_port, gateway={"port": unused_tcp_port, "host": "192.0.2.1"}), POCKET)


# --- blocks


@pytest.mark.parametrize(
    ("section", "field"), [("pool", "memory_bytes"), ("prefill", "kv_cache_bytes"), ("decode", "kv_cache_bytes")]
)
def test_each_memory_must_hold_one_request(section: str, field: str, unused_tcp_port: int) -> None:
    preflight.check(separate(unused_tcp_port, **{section: {field: one_context()}}), POCKET)
    short = separate(unused_tcp_port, **{section: {field: one_context() - 1}})
    message = (
        rf"{section}\.{field} is \d+ MiB, but one request of {POCKET.max_context_len} tokens needs \d+ MiB"
        r".*; set it higher, or model\.max_context_len lower"
    )
    with pytest.raises(ConfigError, match=message):
        preflight.check(short, POCKET)


@pytest.mark.parametrize("topology", [Topology.ELASTIC, Topology.COLOCATED])
@pytest.mark.parametrize(("section", "field"), [("pool", "memory_bytes"), ("prefill", "kv_cache_bytes")])
def test_workers_of_both_phases_have_neither_pool_nor_prefill_workers(
    section: str, field: str, topology: Topology, unused_tcp_port: int
) -> None:
    small = replace(config(unused_tcp_port, **{section: {field: 1}}), topology=topology)
    preflight.check(small, POCKET)


def test_a_shorter_context_needs_less(unused_tcp_port: int) -> None:
    shorter = resolve_model(ModelSectionConfig(max_context_len=64))
    preflight.check(config(unused_tcp_port, decode={"kv_cache_bytes": one_context(shorter)}), shorter)


# --- memory


def test_a_machine_without_the_memory(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    available(monkeypatch, 100 * MIB)
    message = (
        r"\d+ MiB are needed \(workers \d+, KV pool 256\), 100 MiB are available; set pool\.memory_bytes, "
        r"prefill\.kv_cache_bytes and decode\.kv_cache_bytes lower"
    )
    with pytest.raises(NotEnoughMemory, match=f"{message}, or use topology=elastic"):
        preflight.check(separate(unused_tcp_port), POCKET)
    with pytest.raises(NotEnoughMemory, match=f"{message}$"):  # the policy knows no other workers
        preflight.check(separate(unused_tcp_port, scheduling={"policy": "aligned"}), POCKET)
    with pytest.raises(NotEnoughMemory, match=r"set decode\.count or decode\.kv_cache_bytes lower$"):
        preflight.check(config(unused_tcp_port), POCKET)


def test_every_worker_counts_with_its_weights(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    three = separate(unused_tcp_port, decode={"count": 2})
    weights = POCKET.weight_bytes
    needed = 3 * weights + 2 * three.decode.kv_cache_bytes + three.prefill.kv_cache_bytes + three.pool.memory_bytes
    available(monkeypatch, needed)
    preflight.check(three, POCKET)
    available(monkeypatch, needed - 1)
    with pytest.raises(NotEnoughMemory):
        preflight.check(three, POCKET)


def test_a_memory_file_system_that_is_too_small(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    shared_memory(monkeypatch, 64 * MIB)
    message = r"the KV pool needs 256 MiB in /dev/shm, where 64 MiB are free; set pool\.memory_bytes lower"
    with pytest.raises(NotEnoughMemory, match=message):
        preflight.check(separate(unused_tcp_port), POCKET)


@pytest.mark.parametrize("topology", [Topology.ELASTIC, Topology.COLOCATED])
def test_without_a_pool_no_memory_file_system_is_needed(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int, topology: Topology
) -> None:
    shared_memory(monkeypatch, 0)
    preflight.check(replace(config(unused_tcp_port), topology=topology), POCKET)


# --- the model


def test_a_model_without_a_tokenizer(tmp_path: Path, unused_tcp_port: int) -> None:
    served = resolve_model(small_config(tmp_path / "model").model)
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        preflight.check(config(unused_tcp_port), served)


# --- policies


def apt_serve(port: int, **settings: Any) -> ClusterConfig:
    made = config(port, scheduling={"policy": "apt_serve", "policy_params": settings})
    return replace(made, topology=Topology.COLOCATED)


def test_a_hidden_cache_that_would_not_be_smaller_is_refused_with_what_to_do(unused_tcp_port: int) -> None:
    with pytest.raises(ConfigError, match=r"'apt_serve' keeps layer inputs .*hybrid_cache=false"):
        preflight.check(apt_serve(unused_tcp_port), POCKET)
    preflight.check(apt_serve(unused_tcp_port, hybrid_cache=False), POCKET)


def test_a_cache_of_8_bits_needs_less_and_excludes_what_rounds_or_replaces_it(
    unused_tcp_port: int, tmp_path: Path
) -> None:
    int8 = {"engine": {"kv_cache_dtype": "int8"}}
    served = resolve_model(ModelSectionConfig(), EngineConfig(kv_cache_dtype="int8"))
    layout, exact = served.block_layout(16), POCKET.block_layout(16)
    per_head = exact.head_dim + 4
    assert layout.token_bytes * 4 * exact.head_dim == exact.token_bytes * per_head
    needed = {"kv_cache_bytes": layout.token_bytes * (served.max_context_len + 16)}
    fits = config(unused_tcp_port, decode=needed, prefill=needed, **int8)
    preflight.check(fits, served)
    with pytest.raises(ConfigError, match=r"kv_cache_bytes is .* one request of"):
        preflight.check(fits, POCKET)
    for sections, message in (
        ({"decode": {"swap_format": "int8"}}, r"swap_format=int8 would round what engine.kv_cache_dtype=int8 has"),
        ({"engine": {"kv_cache_dtype": "int8", "device": "cuda"}}, r"kv_cache_dtype=int8 is computed on CPUs alone"),
        ({"engine": {"kv_cache_dtype": "fp8"}}, r"kv_cache_dtype=fp8 is computed on GPUs, not on"),
    ):
        with pytest.raises(ConfigError, match=message):
            preflight._check_rounded_cache(config(unused_tcp_port, **{**int8, **sections}))
    of_own = {**TINY_LLAMA, "num_key_value_heads": TINY_LLAMA["num_attention_heads"]}
    small = small_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(of_own))
    made = apt_serve(unused_tcp_port)
    made = replace(made, engine=replace(made.engine, kv_cache_dtype="int8"))
    with pytest.raises(ConfigError, match=r"int8 rounds keys and values, and policy 'apt_serve' keeps layer inputs"):
        preflight.check(made, resolve_model(replace(small.model, random_weights=True)))


def test_what_is_made_anew_of_hidden_caches_needs_room_as_well(unused_tcp_port: int, tmp_path: Path) -> None:
    small = small_config(tmp_path)
    of_own = {**TINY_LLAMA, "num_key_value_heads": TINY_LLAMA["num_attention_heads"]}
    of_own["vocab_size"] = POCKET.config.vocab_size
    (tmp_path / "config.json").write_text(json.dumps(of_own))
    (tmp_path / "tokenizer.json").write_bytes((POCKET.folder / "tokenizer.json").read_bytes())
    served = resolve_model(replace(small.model, random_weights=True))
    memory = {"kv_cache_bytes": one_context(served)}
    made = replace(apt_serve(unused_tcp_port), decode=replace(ClusterConfig().decode, **memory))
    with pytest.raises(ConfigError, match=r"decode\.kv_cache_bytes is .* one request of 512 tokens needs"):
        preflight.check(made, served)
    memory["kv_cache_bytes"] *= 2  # layers: 2, and a block of both is made anew in two blocks of one
    made = replace(made, decode=replace(made.decode, **memory))
    preflight.check(made, served)
    with pytest.raises(ConfigError, match=r"swap_format=int8 is for keys and values, and policy 'apt_serve'"):
        preflight.check(replace(made, decode=replace(made.decode, swap_format="int8")), served)


def test_a_gguf_file_is_checked_whole(unused_tcp_port: int, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", "llama", ("Q4_K", "Q6_K"))
    served = resolve_model(ModelSectionConfig(path=str(path)))
    preflight.check(config(unused_tcp_port), served)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="may be truncated"):
        preflight.check(config(unused_tcp_port), served)
