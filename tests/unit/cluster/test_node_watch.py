"""The watch over Ray's processes of one host, with other processes in their place."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from alignedserve.cluster.local_ray import node_watch
from alignedserve.cluster.local_ray.node_watch import NodeProcesses, NodeWatch, kill_all
from tests.support.child_processes import has_ended

pytestmark = pytest.mark.slow

PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print(flush=True); sys.stdin.read()"
PATIENCE_S = 60.0


class Ray:
    """A head, a node process and a template of workers with a child each, and what the head answers."""

    def __init__(self) -> None:
        self.head = subprocess.Popen(["sleep", "600"])
        self.raylet, self.template = self._parent(), self._parent()
        self.answer: bool | None = True
        by_name = {"the head": self.head, "the node": self.raylet}
        self.processes = NodeProcesses(by_name, lambda: self.answer, [self.raylet.pid, self.template.pid])

    @staticmethod
    def _parent() -> subprocess.Popen[bytes]:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        parent.stdout.readline()  # its child is there
        return parent

    def end(self) -> None:
        """Kill what is left. Not by `kill_all`: a child is gone only once some far parent has waited for it."""
        for one in (self.head, self.raylet, self.template):
            if one.poll() is None:
                parent = psutil.Process(one.pid)
                for process in (*parent.children(recursive=True), parent):
                    process.kill()
            one.communicate()


@pytest.fixture
def ray() -> Iterator[Ray]:
    made = Ray()
    yield made
    made.end()


def never(problem: str) -> None:
    raise AssertionError(problem)


def test_the_end_of_either_process_is_a_loss_that_says_how(ray: Ray) -> None:
    watch = NodeWatch(ray.processes, never)
    assert watch.look() is None
    ray.head.kill()
    ray.head.wait()
    assert watch.look() == watch.problem == "the head has ended by signal 9"


def test_what_the_node_process_and_the_template_have_started_is_known_after_their_ends(ray: Ray) -> None:
    watch = NodeWatch(ray.processes, never)
    for parent, problem in ((ray.template, None), (ray.raylet, "the node has ended by signal 9")):
        parent.kill()
        parent.wait()
        assert watch.look() == problem
    assert len(watch.children) == 2
    assert all(child.is_running() for child in watch.children)
    kill_all(watch.children)
    assert all(has_ended(child) for child in watch.children)


def test_processes_end_with_all_that_they_have_started_also_stopped_ones(ray: Ray) -> None:
    parent = psutil.Process(ray.raylet.pid)
    (child,) = parent.children()
    parent.suspend()
    child.suspend()
    kill_all([parent])
    ray.raylet.wait()
    assert has_ended(child)


def test_a_silent_head_is_given_up_by_looks_in_a_row_alone(ray: Ray) -> None:
    watch = NodeWatch(ray.processes, never)
    for answers in ([None] * 19, [True], [None] * 19):
        for ray.answer in answers:
            assert watch.look() is None
    ray.answer = None
    assert "gcs_server) has not answered 20 times" in (watch.look() or "")


def test_a_node_that_the_head_has_given_up_is_lost(ray: Ray) -> None:
    watch = NodeWatch(ray.processes, never)
    ray.answer = False
    assert "raylet) has not answered for a minute" in (watch.look() or "")


def test_a_loss_that_nobody_heeds_is_reported_and_one_that_is_heeded_is_not(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "_LOOK_S", 0.01)
    reported = threading.Event()
    heeded = NodeWatch(ray.processes, never)
    heeded.start()
    ray.head.kill()
    while heeded.problem is None:
        threading.Event().wait(0.01)
    heeded.stop()
    monkeypatch.setattr(node_watch, "_UNHEEDED_S", 0.01)
    unheeded = NodeWatch(ray.processes, lambda problem: reported.set())
    unheeded.start()
    assert reported.wait(PATIENCE_S)
    unheeded.stop()
