"""`alignedserve demo`, whose workers are hurt meanwhile."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.serving import COMMAND

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_answer_of_the_demo_is_right_while_workers_are_hurt(tmp_path: Path) -> None:
    options = ("--duration", "25", "--set", "decode.count=2", "--faults")
    short = ("--rate", "1", "--json", "--set", "engine.calibration_s=0.2")
    folders = {"ALIGNEDSERVE_RUN_DIR": str(tmp_path / "run"), "ALIGNEDSERVE_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        [COMMAND, "demo", *short, *options],
        env=os.environ | folders,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["problems"], report["blocks_leaked"], report["num_faults"]) == ([], 0, 4)
    assert report["load"]["total"]["num_completed"] == report["load"]["total"]["num_sent"] > 0
    assert report["num_valid"] == report["num_structured"] > 0
