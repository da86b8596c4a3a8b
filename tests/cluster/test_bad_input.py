"""Input that `alignedserve serve` cannot use: one clear line, an exit code, and nothing started."""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.serving import COMMAND
from tests.cluster.warm_command import WarmCommand
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG_ERROR, FAILURE = 2, 1
RANDOM = "model.random_weights=true"
Run = Callable[[list[str], dict[str, str]], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCommand]:
    with WarmCommand(tmp_path_factory.mktemp("printed")) as command:
        yield command


def cold(arguments: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=200)


def refused(run: Run, model: Path, *overrides: str, run_dir: Path) -> tuple[int, str]:
    """Return the exit code and the one line on stderr, having checked that nothing was started."""
    arguments = ["serve", str(model), "--set", f"gateway.port={free_port()}"]
    arguments += [part for override in overrides for part in ("--set", override)]
    done = run(arguments, {**os.environ, "ALIGNEDSERVE_RUN_DIR": str(run_dir)})
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert not run_dir.is_dir() or not any(run_dir.iterdir()), "something was started"
    return done.returncode, done.stderr.removeprefix("error: ").strip()


@pytest.fixture
def model(tmp_path: Path, random_model: Path) -> Path:
    return Path(shutil.copytree(random_model, tmp_path / "model"))


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def header(tensors: object) -> bytes:
    encoded = json.dumps(tensors).encode()
    return struct.pack("<Q", len(encoded)) + encoded


HALF = header({"model.norm.weight": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}) + b"\0" * 500
INDEX = json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}).encode()
OUTSIDE = json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}).encode()
NO_MODEL = json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}).encode()


def test_half_a_file(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(HALF)
    code, line = refused(cold, model, run_dir=tmp_path / "run")
    assert "model.safetensors is truncated or not a safetensors file" in line
    assert code == FAILURE


def test_too_little_room(warm: WarmCommand, model: Path, tmp_path: Path) -> None:
    separate = "topology=disaggregated"
    code, line = refused(warm.run, model, RANDOM, separate, "pool.memory_bytes=1MiB", run_dir=tmp_path / "run")
    assert "pool.memory_bytes is 1 MiB, but one request of 2048 tokens needs" in line
    assert code == CONFIG_ERROR


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (shutil.rmtree, "is neither a folder"),
        (remove("config.json"), "config.json does not exist"),
        (write("config.json", b"{"), "config.json is not valid JSON"),
        (write("config.json", NO_MODEL), "model_type 'mamba' is not one of"),
        (remove("tokenizer.json"), "tokenizer.json is missing"),
        (write("tokenizer.json", b"{}"), "tokenizer.json cannot be read"),
        (lambda folder: None, "holds neither model.safetensors nor"),
        (write("pytorch_model.bin", b"\x80\x04."), "pytorch_model.bin, a pickle format that can run code"),
        (write("model.safetensors", b""), "model.safetensors is truncated or not a safetensors file"),
        (write("model.safetensors", b"\xff" * 500), "model.safetensors is truncated or not a safetensors file"),
        (write("model.safetensors.index.json", INDEX), "model-1.safetensors is missing"),
        (write("model.safetensors.index.json", OUTSIDE), "'../model.safetensors' is not the name of"),
    ],
)
def test_model_folders(
    warm: WarmCommand, model: Path, tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    change(model)
    code, line = refused(warm.run, model, run_dir=tmp_path / "run")
    assert problem in line
    assert code == FAILURE


@pytest.mark.parametrize(
    ("override", "code", "problem"),
    [
        ("model.dtype=float8", CONFIG_ERROR, "model.dtype must be one of auto, float32, bfloat16, float16"),
        ("model.max_context_len=100000", CONFIG_ERROR, "the model was made for 2048"),
        ("decode.cout=2", CONFIG_ERROR, "decode: unknown field `cout`; did you mean `count`?"),
        ("decode.count=two", CONFIG_ERROR, "decode.count must be a whole number (it is 'two')"),
        ("topology=both", CONFIG_ERROR, "topology must be one of elastic, colocated, disaggregated (it is 'both')"),
        ("engine.device=gpu", CONFIG_ERROR, "engine.device must be auto, cpu, cuda or cuda:N"),
        ("engine.device=cuda:99", CONFIG_ERROR, "engine.device is cuda:99, but"),
        ("links.transport=tcp", CONFIG_ERROR, "links.transport must be unix"),
        ("batching.policy=best", CONFIG_ERROR, "unknown batch former 'best'; known: density_first, fcfs"),
        ("router.prefill_order=best", CONFIG_ERROR, "unknown order 'best'; known: deadline, fcfs, fcfs_classed"),
        ("pool.memory_bytes=4000GiB", FAILURE, "set pool.memory_bytes lower"),
        ("decode.kv_cache_bytes=4000GiB", FAILURE, "decode.kv_cache_bytes lower"),
        ("gateway.port=0", CONFIG_ERROR, "gateway.port must be a TCP port"),
        ("gateway.port=70000", CONFIG_ERROR, "gateway.port must be a TCP port"),
        ("gateway.host=203.0.113.7", FAILURE, "cannot listen on 203.0.113.7"),
    ],
)
def test_options(warm: WarmCommand, model: Path, tmp_path: Path, override: str, code: int, problem: str) -> None:
    got, line = refused(warm.run, model, RANDOM, override, run_dir=tmp_path / "run")
    assert problem in line
    assert got == code


def test_a_privileged_port(model: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may listen on any port")
    assert (
        "cannot listen on 127.0.0.1:80" in refused(cold, model, RANDOM, "gateway.port=80", run_dir=tmp_path / "run")[1]
    )


@pytest.mark.parametrize(
    ("run_dir", "problem"),
    [("/proc/none/run", "cannot hold sockets and logs"), (f"/tmp/{'x' * 90}", "too long a path for Unix sockets")],
)
def test_folders_for_sockets(warm: WarmCommand, model: Path, run_dir: str, problem: str) -> None:
    try:
        code, line = refused(warm.run, model, RANDOM, run_dir=Path(run_dir))
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    assert problem in line
    assert "set ALIGNEDSERVE_RUN_DIR" in line
    assert code == FAILURE
