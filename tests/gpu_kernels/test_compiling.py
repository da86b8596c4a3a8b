"""Every GPU kernel compiles, with no GPU at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent
NUM_VARIANTS, NUM_PREFILLS, NUM_PRODUCTS = 50, 4, 10


def compiled(folder: Path, *arguments: str) -> int:
    """Compile in a process of its own; return the number of variants."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.gpu_kernels.compile_all", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.count("shared memory")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    assert compiled(tmp_path, "90") == NUM_VARIANTS


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "120"])
def test_attention_of_prompts_fits_gpus_with_less_shared_memory(capability: str, tmp_path: Path) -> None:
    """Tiles of an H100 need 132 KiB, of which an L4 has 99."""
    assert compiled(tmp_path, capability, "--only", "_prefill") == NUM_PREFILLS


@pytest.mark.slow
def test_products_in_groups_compile_without_units_for_fp8(tmp_path: Path) -> None:
    assert compiled(tmp_path, "80", "--only", "_multiply") == NUM_PRODUCTS
