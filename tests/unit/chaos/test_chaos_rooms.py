"""Forty schedules that bring every process, fault and phase together, pair by pair, against real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forty_schedules_that_cover_every_pair_are_survived(tmp_path: Path) -> None:
    output = tmp_path / "chaos.jsonl"
    command = [sys.executable, "-m", "benchmarks.chaos", "--covering", str(COUNT), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=590)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["problems"] for record in records if not record["is_survived"]] == [], done.stdout
    assert len(records) == COUNT
    assert done.returncode == 0
