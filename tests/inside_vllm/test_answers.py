"""With our scheduler vLLM gives the answers that it gives without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inside_vllm.tiny_model import TINY, make_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), **TINY)


def answers(folder: Path, scheduler: str, seed: int) -> list[list[int]]:
    command = [sys.executable, "-m", "tests.inside_vllm.answers", str(folder), scheduler, str(seed)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("ANSWERS "))


@pytest.mark.timeout(1500)
def test_answers_are_equal_as_far_as_vllm_equals_itself(folder: Path) -> None:
    first, second = answers(folder, "vllm", 1), answers(folder, "vllm", 2)
    ours = answers(folder, "alignedserve_vllm.AlignedScheduler", 1)
    differing = [number for number in range(len(first)) if ours[number] != first[number]]
    itself = [number for number in range(len(first)) if second[number] != first[number]]
    print(f"ours differs in {len(differing)} of {len(first)}, vLLM from itself in {len(itself)}")
    assert [len(answer) for answer in ours] == [len(answer) for answer in first]
    assert len(differing) <= max(len(itself), 1)
