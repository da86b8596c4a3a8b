"""Every GPU kernel compiles, with no GPU at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent
NUM_VARIANTS = 25


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu_kernels.compile_all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shared memory") == NUM_VARIANTS
