"""Forty schedules that bring every process, fault and phase together, pair by pair, against real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 40
PARTS = 4  # two side by side: most of a schedule is waiting


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [pytest.param((1, 2), marks=pytest.mark.promise), (3, 4)])
def test_forty_schedules_that_cover_every_pair_are_survived(tmp_path: Path, parts: tuple[int, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--covering", str(COUNT)]
    outputs = {part: tmp_path / f"chaos-{part}.jsonl" for part in parts}
    running = [
        subprocess.Popen([*command, "--part", f"{part}/{PARTS}", "--output", output], stdout=subprocess.DEVNULL)
        for part, output in outputs.items()
    ]
    try:
        ended = [one.wait(550) for one in running]
    finally:
        for one in running:
            one.terminate()  # which ends its rooms
    records = [json.loads(line) for output in outputs.values() for line in output.read_text().splitlines()]
    assert [(record["seed"], record["problems"]) for record in records if not record["is_survived"]] == []
    assert len({record["seed"] for record in records}) == COUNT * len(parts) // PARTS
    assert ended == [0] * len(parts)
