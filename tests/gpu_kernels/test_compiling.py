"""What toy engines launch compiles, with no GPU at hand: within a GPU's limits, its copies ahead of its products."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent
FLOAT32 = "float32"
# Programs that a multiprocessor of an H100 holds, which decode attention is planned for; by the form of the engine.
AT_ONCE = {"bfloat16": 3, "heads of 64": 4, "heads of 256, a window": 2, "FP8 cache": 2, FLOAT32: 2}
ATTENTION = ("_decode_parts", "_prefill")
# On compute capability 9.0: copies that run ahead, and the units that multiply.
AHEAD = ("_decode_parts", "_prefill", "_multiply", "_multiply_stacked", "_add_adapters")
PRODUCTS = {
    "_decode_parts": {"mma"},
    "_prefill": {"wgmma"},
    "_multiply": {"mma", "wgmma"},
    "_multiply_stacked": {"mma", "wgmma"},
}


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Compile in a process of its own; return a row for each kernel."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "tests.gpu_kernels.compile_all", *arguments, "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("**/compiled_kernels.json")
    rows: list[dict[str, Any]] = json.loads(file.read_text())["figures"]["rows"]
    return rows


@pytest.fixture(scope="module")
def on_h100(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Everything that toy engines launch."""
    return compiled(tmp_path_factory.mktemp("h100"), "90")


def test_toy_engines_launch_every_kernel(on_h100: list[dict[str, Any]]) -> None:
    launched = {row["kernel"] for row in on_h100}
    sources = [path.read_text() for path in (ROOT / "kernels" / "gpu").glob("*.py")]
    there = {name for source in sources for name in re.findall(r"\b(_\w+)\[.+\]\(", source)}
    assert len(there) > 10
    assert there <= launched


def test_decode_attention_runs_as_often_at_once_as_planned(on_h100: list[dict[str, Any]]) -> None:
    found = {row["form"]: row["at_once"] for row in reversed(on_h100) if row["kernel"] == "_decode_parts"}
    assert {form: found[form] >= number for form, number in AT_ONCE.items()} == dict.fromkeys(AT_ONCE, True)


def test_copies_run_ahead_of_products_by_matrix_units(on_h100: list[dict[str, Any]]) -> None:
    """Where Triton pipelines a loop no longer, nothing else here would show it."""
    lost = []
    for row in on_h100:
        if row["kernel"] in AHEAD and "cp.async" not in row["instructions"]:
            lost.append(f"copies of {row['kernel']} {row['variant']}")
        units = PRODUCTS.get(row["kernel"])
        if units and row["form"] != FLOAT32 and not units & set(row["instructions"]):
            lost.append(f"products of {row['kernel']} {row['variant']}")
    assert lost == []


@pytest.mark.parametrize(
    ("capability", "form"),
    [("80", "FP8 cache"), ("89", FLOAT32), ("89", "heads of 256, a window"), ("100", FLOAT32), ("120", "FP8 cache")],
)
def test_attention_fits_other_gpus(capability: str, form: str, tmp_path: Path) -> None:
    """Tiles of an H100 need 132 KiB, of which an L4 has 99. Each form on some: `compile_all` has all of them."""
    attention = compiled(tmp_path, capability, "--only", *ATTENTION, "--forms", form)
    assert {row["kernel"] for row in attention} == set(ATTENTION)
    assert all("cp.async" in row["instructions"] for row in attention)


def test_products_in_groups_compile_without_units_for_fp8(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "80", "--only", "_multiply", "--forms", "4 bits", "FP8 in blocks", "packed products")
    assert len(rows) >= 12
    assert all(row["instructions"].keys() >= {"cp.async", "mma"} for row in rows)
