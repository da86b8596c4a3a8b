"""Forty schedules that bring every process, fault and phase together, pair by pair, against real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 40
PARTS = 2  # side by side: most of a schedule is waiting


@pytest.mark.slow
@pytest.mark.promise
@pytest.mark.timeout(600)
def test_forty_schedules_that_cover_every_pair_are_survived(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--covering", str(COUNT)]
    outputs = [tmp_path / f"chaos-{part}.jsonl" for part in range(PARTS)]
    running = [
        subprocess.Popen([*command, "--part", f"{part + 1}/{PARTS}", "--output", output], stdout=subprocess.DEVNULL)
        for part, output in enumerate(outputs)
    ]
    try:
        ended = [one.wait(550) for one in running]
    finally:
        for one in running:
            one.terminate()  # which ends its rooms
    records = [json.loads(line) for output in outputs for line in output.read_text().splitlines()]
    assert [(record["seed"], record["problems"]) for record in records if not record["is_survived"]] == []
    assert sorted(record["seed"] for record in records) == list(range(COUNT))
    assert ended == [0] * PARTS
