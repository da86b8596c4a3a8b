"""The figures of hosts_throughput: tokens of answers that lie partly in a round, and processes by what they do."""

import os
import subprocess
import sys

import pytest

from alignedserve.loadgen.client import CompletionOutcome
from benchmarks.serving.hosts.hosts_throughput import tokens_between
from benchmarks.support.process_cpu import cpu_seconds, kind_of, spent


@pytest.mark.parametrize(
    ("begin_s", "end_s", "tokens"), [(0, 100, 128), (10, 12, 128), (11, 12, 64), (9, 10.5, 32), (12, 20, 0), (0, 9, 0)]
)
def test_tokens_count_by_the_time_that_they_took(begin_s: float, end_s: float, tokens: float) -> None:
    answer = CompletionOutcome(token_times_s=[10.0, 10.1, 12.0], ended_s=12.0, num_output_tokens=128)  # three chunks
    assert tokens_between(answer, begin_s, end_s) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("command_line", "kind"),
    [
        ("ray::decode-0:ColocatedWorkerActor", "workers"),
        ("ray::GatewayActor.__init__", "gateways"),
        ("ray::DashboardAgent", "Ray's agents"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylets"),
        ("python -m alignedserve up --set a.b=c", "driver and supervisor"),
        ("sleep 5", "others"),
    ],
)
def test_processes_by_what_they_do(command_line: str, kind: str) -> None:
    assert kind_of(command_line) == kind


def test_processor_time_of_what_was_started() -> None:
    burns = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", burns], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None, "a pipe"
        child.stdout.readline()
        assert spent(before, cpu_seconds([os.getpid()]))["others"] >= 0.25  # counted in ticks
        child.communicate(b"\n")
