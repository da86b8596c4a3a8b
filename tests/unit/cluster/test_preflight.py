"""Checks before the start: what cannot work is said in one line, with what to change."""

import contextlib
import dataclasses
import json
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from msgspec.structs import replace

from alignedserve.cluster import preflight
from alignedserve.cluster.memory_planner import with_block_size
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, engines_of
from alignedserve.cluster.preflight import check_configuration, window_cache_of
from alignedserve.config.sections import (
    MIB,
    ClusterConfig,
    EngineConfig,
    LoraConfig,
    ModelSectionConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import (
    AddressInUse,
    ConfigError,
    ModelError,
    ModelNotFound,
    NotEnoughMemory,
    UnsupportedModel,
)
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.scheduling.factory import resolve_policy
from tests.harnesses.clusters.in_process import small_config
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_hybrids import MAMBA2
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


LFM2 = {**TINY_LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}


def _section(folder: Path, **changes: object) -> ModelSectionConfig:
    (folder / "config.json").write_text(json.dumps({**LFM2, **changes}))
    return ModelSectionConfig(path=str(folder), random_weights=True)


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    return resolve_model(_section(tmp_path))


def test_settings(served: ServedModel) -> None:
    plain = ClusterConfig()
    refused = {
        "swap_format=int8 rounds .* blocks of a model with short convolutions": replace(
            plain, decode=replace(plain.decode, swap_format="int8")
        ),
        "keeps layer inputs .* short convolutions": replace(plain, scheduling=SchedulingConfig(policy="apt_serve")),
        "short convolutions has no adapters": replace(plain, lora=LoraConfig(allowed_folder="/adapters")),
    }
    for message, config in refused.items():
        with pytest.raises(ConfigError, match=message):
            check_configuration(config, served)


def test_devices_and_ranks(tmp_path: Path) -> None:
    section = _section(tmp_path)
    assert resolve_model(section, EngineConfig(device="cuda")).decoder.state is not None
    with pytest.raises(ConfigError, match="states of the model's layers are not divided"):
        resolve_model(section, EngineConfig(tensor_parallel=2))


def test_a_model_of_states_alone(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="without any layer of attention"):
        resolve_model(_section(tmp_path, layer_types=["conv", "conv"]))


def test_blocks_are_larger_where_states_are(tmp_path: Path, served: ServedModel) -> None:
    unset, given = from_mapping({}), from_mapping({"engine": {"block_size": 8}})
    assert with_block_size(unset, served).engine.block_size == 16
    assert with_block_size(given, served).engine.block_size == 8
    delta = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    large = resolve_model(_section(tmp_path, **delta))
    assert with_block_size(unset, large).engine.block_size == 1024


def test_large_states_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Small states never."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    delta = {"model_type": "qwen3_5_text", "head_dim": 16, **heads, "linear_value_head_dim": 32}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    large = resolve_model(_section(tmp_path, **delta, **kinds), states_apart=True)
    layout = large.block_layout(large.default_block_size)
    assert layout.state_blocks
    assert (layout.block_size, layout.context_bytes) == (64, 16384)  # for states of 10560 bytes
    small = resolve_model(_section(tmp_path), states_apart=True)
    assert not small.block_layout(small.default_block_size).state_blocks


GEMMA3N = {**TINY_LLAMA, "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 0}
GEMMA4 = {**TINY_LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 6}
TITLE = "layer embeddings, shared keys or several streams"


def test_settings_devices_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3N))
    section = ModelSectionConfig(path=str(tmp_path), random_weights=True)
    served, plain = resolve_model(section), ClusterConfig()
    for config in (
        replace(plain, scheduling=SchedulingConfig(policy="apt_serve")),
        replace(plain, lora=LoraConfig(allowed_folder="/adapters")),
    ):
        with pytest.raises(ConfigError, match=TITLE):
            check_configuration(config, served)
    assert resolve_model(section, EngineConfig(device="cuda")).decoder.extras is not None
    with pytest.raises(ConfigError, match=TITLE):
        resolve_model(section, EngineConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match=TITLE):
        resolve_model(section, EngineConfig(pipeline_parallel=2))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA3N, {"altup_active_idx": 1}, "altup_active_idx other than 0"),
        (GEMMA3N, {"intermediate_size": [32, 32]}, "intermediate_size must be a whole number, or a list of 5"),
        (GEMMA3N, {"num_kv_shared_layers": 1}, "num_kv_shared_layers must leave a layer of each kind"),
        (GEMMA3N, {"attention_bias": True}, "attention_bias of gemma3n_text"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention other than vision"),
        (GEMMA4, {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config must give all layers without"),
        (GEMMA4, {"per_layer_config": {"5": {"sliding_window": 8}}}, "head_dim and num_key_value_heads alone"),
        (GEMMA4, {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts must be between"),
    ],
)
def test_configs_that_contradict_themselves(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, UnsupportedModel), match=message):
        parse_model_config({**config, **changes})


WINDOWS = {
    "model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 8192,
}  # fmt: skip
RING = ClusterConfig(engine=replace(ClusterConfig().engine, window_cache="ring"))


def _resolved(folder: Path, choice: str, device: str = "cpu", *, ranks: int = 1, **changes: Any) -> ServedModel:
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **WINDOWS, **changes}))
    section = ModelSectionConfig(path=str(folder), random_weights=True)
    return resolve_model(section, EngineConfig(device=device, tensor_parallel=ranks, window_cache=choice))


@pytest.mark.parametrize(("window", "longest", "has_rings"), [(128, 8192, True), (128, 200, False), (900, 8192, False)])
def test_chosen_where_they_pay(window: int, longest: int, has_rings: bool, tmp_path: Path) -> None:
    """A long context takes far less by them, and an ordinary one no more."""
    served = _resolved(tmp_path, "auto", sliding_window=window, max_position_embeddings=longest)
    assert served.has_rings is has_rings
    assert not _resolved(tmp_path, "whole", sliding_window=window).has_rings
    for device in ("cpu", "cuda"):
        assert _resolved(tmp_path, "ring", device, sliding_window=window).has_rings
    assert not _resolved(tmp_path, "auto", "cuda").has_rings  # until they are measured there
    if has_rings:
        rings, whole = served.block_layout(16), _resolved(tmp_path, "whole").block_layout(16)
        assert rings.bytes_of(8000) < 0.6 * whole.bytes_of(8000)
        assert rings.digest() != whole.digest()


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("the ranks and stages of a worker have none", {"ranks": 2}),
        ("no layers with a window beside plain ones", {"model_type": "llama", "layer_types": None}),
        ("no layers with a window beside plain ones", {"layer_types": ["sliding_attention"] * 4}),
    ],
)
def test_refused_by_name_where_a_model_has_none(reason: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.window_cache=ring: .*{reason}.*; leave it at auto"):
        _resolved(tmp_path, "ring", **changes)
    assert not _resolved(tmp_path, "auto", **changes).has_rings


@pytest.mark.parametrize(
    "changes",
    [
        {"decode": replace(ClusterConfig().decode, swap_format="int8")},
        {"scheduling": SchedulingConfig(policy="apt_serve")},
    ],
)
def test_settings_that_exclude_them(changes: dict[str, Any], tmp_path: Path) -> None:
    config = replace(RING, **changes)
    assert window_cache_of(config) == "ring"
    with pytest.raises(ConfigError, match=r"engine\.window_cache=ring: "):
        check_configuration(config, _resolved(tmp_path, "ring"))
    assert window_cache_of(replace(config, engine=ClusterConfig().engine)) == "whole"


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str, warning: str | None = None) -> None:
    """PyTorch as it would be beside GPUs of these names."""

    def is_available() -> bool:
        if warning is not None:
            warnings.warn(warning, stacklevel=1)
        return warning is None

    def properties(gpu: Any) -> SimpleNamespace:
        return SimpleNamespace(name=names[torch.device(gpu).index])

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def refusal(size: int, device: str = "cuda") -> str:
    """Return why the preflight refuses workers of so many ranks."""
    sections = {"engine": {"device": device, "tensor_parallel": size}, "topology": "colocated"}
    config = resolve_policy(from_mapping(sections | {"prefix_cache": {"host_bytes": 0}}))
    served = dataclasses.replace(resolve_model(ModelSectionConfig()), has_random_weights=True)
    with pytest.raises(ConfigError) as caught:
        preflight.check(config, served)
    return str(caught.value)


def test_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100")
    assert refusal(2) == (
        "engine.tensor_parallel is 2 from cuda:0 on, but there are 1 GPUs here, and NCCL takes no two ranks on one "
        "GPU; set it lower"
    )


def test_more_ranks_than_gpus_behind_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100", "H100")
    assert refusal(2, "cuda:1").startswith("engine.tensor_parallel is 2 from cuda:1 on, but there are 2 GPUs here")


def test_gpus_of_two_kinds_in_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100", "H100", "H100", "L4")
    assert refusal(2) == (
        "engine.tensor_parallel: the ranks' GPUs (cuda:2, cuda:3) are of different kinds: H100, L4; leave out the odd "
        "ones by CUDA_VISIBLE_DEVICES"
    )
    assert "(cuda:2, cuda:3)" in refusal(2, "cuda:2")


def test_copies_between_gpus_are_not_for_several_ranks() -> None:
    engine = {"device": "cuda", "kv_transport": "cuda_ipc", "tensor_parallel": 2}
    served = dataclasses.replace(resolve_model(ModelSectionConfig(max_context_len=256)), has_random_weights=True)
    config = resolve_policy(from_mapping({"engine": engine, "topology": "colocated"}))
    with pytest.raises(ConfigError, match=r"engine.kv_transport is cuda_ipc, .* of several ranks"):
        preflight.check_configuration(config, served)


@pytest.mark.parametrize("topology", ["colocated", "elastic", "disaggregated"])
def test_workers_of_several_gpus_are_served_in_every_topology(topology: str) -> None:
    """What the machine has does not matter."""
    sections = {"engine": {"device": "cuda", "tensor_parallel": 2}, "topology": topology}
    served = dataclasses.replace(resolve_model(ModelSectionConfig(max_context_len=256)), has_random_weights=True)
    preflight.check_configuration(resolve_policy(from_mapping(sections)), served)


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100", "H100", warning=TOO_OLD)
    assert refusal(2) == f"engine.device is cuda, but {TOO_OLD}"


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel is 3, but the model's \d+ attention heads cannot"):
        resolve_model(ModelSectionConfig(), EngineConfig(tensor_parallel=3))


def test_a_node_with_fewer_gpus_than_ranks() -> None:
    config = resolve_policy(from_mapping({"engine": {"tensor_parallel": 4}, "decode": {"count": 1}}))
    node = NodeCapacity("node-0", "here", 16, ("cuda:0", "cuda:1"))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel is 4, but of the GPUs .* no 4 are neighbours; set it lower"
    ):
        engines_of(DeploymentPlacement(config).place([node])[0], config.engine, node)


STOPPING = SchedulingConfig(yield_between_layers=True)


@pytest.mark.parametrize(
    ("engine", "reason"), [(EngineConfig(tensor_parallel=2), "ranks go through the layers of a pass together")]
)
def test_such_an_engine_is_refused(engine: EngineConfig, reason: str) -> None:
    config = ClusterConfig(engine=engine, scheduling=STOPPING)
    served = dataclasses.replace(resolve_model(ModelSectionConfig()), tensor_parallel=engine.tensor_parallel)
    with pytest.raises(ConfigError, match=f"yield_between_layers cannot be had: {reason}"):
        check_configuration(config, served)
    floored = ClusterConfig(engine=engine, scheduling=SchedulingConfig(best_effort_floor=0.2))
    with pytest.raises(ConfigError, match=f"best_effort_floor has no effect, as no pass stops: {reason}"):
        check_configuration(floored, served)
    check_configuration(ClusterConfig(engine=engine), served)


def test_on_a_gpu_passes_stop_where_that_is_asked_for(tmp_path: Path) -> None:
    engine, floored = EngineConfig(device="cuda:0"), SchedulingConfig(best_effort_floor=0.2)
    stopping = ClusterConfig(
        engine=engine, scheduling=SchedulingConfig(yield_between_layers=True, best_effort_floor=0.2)
    )
    check_configuration(stopping, resolve_model(ModelSectionConfig()))
    with pytest.raises(ConfigError, match="best_effort_floor has no effect on a GPU, where passes stop only with"):
        check_configuration(ClusterConfig(engine=engine, scheduling=floored), resolve_model(ModelSectionConfig()))
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | MAMBA2 | {"num_hidden_layers": 3}))
    hybrid = resolve_model(ModelSectionConfig(path=str(tmp_path), random_weights=True))
    with pytest.raises(ConfigError, match="on a GPU, models with states or with caches of windows"):
        check_configuration(stopping, hybrid)
