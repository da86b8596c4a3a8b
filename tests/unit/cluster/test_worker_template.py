"""The template of workers: it forks Ray's workers on order, and without it they start as Ray starts them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from alignedserve.cluster.local_ray import fork_worker
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no template")]

CREATOR = """
import sys
from pathlib import Path
from alignedserve.cluster.local_ray.worker_template import TemplateLoads, WorkerTemplate

template = WorkerTemplate.fork(TemplateLoads(["alignedserve.core.ids", "alignedserve.batches.hours"], 1, 1))
print(template.pid if template.listen(Path(sys.argv[1])) else 0, flush=True)
sys.stdin.read()
"""


class Template:
    """A template, and the process that has forked it."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "workers.sock"
        command = [sys.executable, "-c", CREATOR, str(self.address)]
        self.creator = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.creator.stdout is not None
        self.process = psutil.Process(int(self.creator.stdout.readline()))

    def order(self, *words: str, job: str = "01000000") -> "subprocess.CompletedProcess[str]":
        """Run a worker's command as Ray does, with the template's stand-in before it; return what came of both."""
        command = [sys.executable, "-I", "-S", fork_worker.__file__, str(self.address), *words]
        environment = os.environ | {"RAY_JOB_ID": job}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture
def template(tmp_path: Path) -> Iterator[Template]:
    made = Template(tmp_path)
    yield made
    made.creator.communicate()


def test_a_worker_is_forked_with_the_words_and_files_of_its_command(template: Template) -> None:
    ended = template.order("anything.py", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: default_worker.py [-h] --cluster-id")
    assert template.process.is_running()


@pytest.mark.parametrize("order", [b"", b"/tmp\x00none", b"/tmp\x007\x00too few"])
def test_what_is_no_order_starts_nothing(template: Template, order: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(template.address))
        socket.send_fds(connection, [b"\0"], [0, 1, 2])
        connection.sendall(order)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert template.process.children() == []
    assert template.order("anything.py", "--help").returncode == 0


def test_a_worker_of_another_job_starts_by_its_command(template: Template) -> None:
    assert template.order("-c", "print('by itself')", job="02000000").stdout == "by itself\n"


def test_without_a_template_a_worker_starts_by_its_command(template: Template) -> None:
    template.process.kill()
    assert template.order("-c", "import sys; print('by itself', sys.argv)").stdout == "by itself ['-c']\n"


def test_a_template_ends_with_the_process_that_has_forked_it(template: Template) -> None:
    template.creator.kill()
    template.process.wait(10)


def test_a_template_that_somebody_else_has_waited_for_stops() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    WorkerTemplate(process.pid, socket.socket()).stop()
