"""What `serve` does when Ray was lost: as a process of its own, whose successor it becomes."""

import os
import signal
import subprocess
import sys

import pytest

from alignedserve.config.environment import NODE_LOSSES_VARIABLE
from tests.support.marks import each

pytestmark = pytest.mark.slow

# Loses Ray at once, every time; leaves a file open, ignores signals as the end of a cluster does.
LOSING = """
import os, signal, sys, time
from alignedserve.cli.commands.serving import node_losses
from alignedserve.core.errors import NodeLost

node_losses._FIRST_PAUSE_S = float(sys.argv[2])
print(os.getpid(), os.environ.get("ALIGNEDSERVE_NODE_LOSSES"), os.environ.get("RAY_MADE_UP"), flush=True)
print(len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, flush=True)
losses = node_losses.NodeLosses()
losses.pause()
os.environ["RAY_MADE_UP"] = "1"
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
losses.go_on_after(NodeLost("the node process has ended"), is_wanted=sys.argv[1] == "again")
"""


def lose(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", LOSING, *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_starts_again_in_its_own_place_a_few_times_and_then_ends_with_its_code() -> None:
    process = lose("again", "0.001")
    out, err = process.communicate(timeout=120)
    lines = [line.split() for line in out.splitlines()]
    starts, states = lines[::2], lines[1::2]
    pid = str(process.pid)
    assert starts == [[pid, "None", "None"], *([pid, str(number), "None"] for number in range(1, 6))]
    assert [state[1] for state in states] == ["False"] * 6
    assert len({state[0] for state in states}) == 1  # files that were open are closed
    assert process.returncode == 75
    assert err.count("Starting again") == 5
    assert err.splitlines()[-1] == "error: the node process has ended"


def test_where_that_is_not_wanted_it_ends_with_its_code() -> None:
    process = lose("end", "0.001")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, len(out.splitlines())) == (75, 2)
    assert err == "error: the node process has ended\n"


@each("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_ended_while_its_successor_waits(number: signal.Signals) -> None:
    process = lose("again", "600")
    assert process.stdout is not None
    while process.stdout.readline().split()[1] != "1":
        continue
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == -number


@each(("noted", "number"), [("3", "4"), ("x", "1"), ("-1", "1"), ("9999", "1"), ("", "1")])
def test_a_number_of_losses_that_is_none_counts_as_the_first(noted: str, number: str) -> None:
    process = lose("again", "0.001", **{NODE_LOSSES_VARIABLE: noted})
    out, _ = process.communicate(timeout=120)
    assert out.splitlines()[2].split()[1] == number
