"""`alignedserve demo` with the default topology, whose workers are hurt meanwhile, and with the paper's."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.serving import COMMAND

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("options", "num_faults"),
    [
        (("--duration", "25", "--set", "decode.count=2", "--faults"), 4),
        (("--duration", "12", "--set", "topology=disaggregated"), 0),
    ],
    ids=["elastic", "disaggregated"],
)
def test_every_answer_of_the_demo_is_right(tmp_path: Path, options: tuple[str, ...], num_faults: int) -> None:
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
    assert (report["problems"], report["blocks_leaked"], report["num_faults"]) == ([], 0, num_faults)
    assert report["load"]["total"]["num_completed"] == report["load"]["total"]["num_sent"] > 0
    assert report["num_valid"] == report["num_structured"]
    assert (report["num_structured"] > 0) == (num_faults > 0)
    if not num_faults:
        assert report["handoffs_verified"] > 0  # from the prefill worker by way of the pool
