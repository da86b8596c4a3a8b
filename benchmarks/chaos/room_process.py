"""The processes of a cluster without Ray: the same actors, forked from a server that has imported everything.

A start takes a tenth of a second instead of several, and what dies is started again, as Ray does it. Objects go from
this program to its own children alone, over pipes that `multiprocessing` makes.
"""

import contextlib
import importlib
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray

from alignedserve.process.process_spec import ProcessSpec

_AGAIN_S = 0.1  # between the end of a process and its next start
_FAILED = 75  # it could not start, and is tried again
_PRELOADED = (
    "benchmarks.chaos.room_process",
    "alignedserve.batch_worker.actor",
    "alignedserve.gateway.actor",
    "alignedserve.worker_core.actor",
    "alignedserve.worker_core.service",
    "decode_worker.actor",
    "decode_worker.service",
    "kvpool.actor",
    "prefill_worker.actor",
    "prefill_worker.service",
    "router.actor",
)


class RoomPlan(NamedTuple):
    """What a process is made of."""

    module: str  # of the actor's class
    class_name: str
    arguments: tuple[Any, ...]
    spec: ProcessSpec


def forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class RoomProcess:
    """One process, started again whenever it ends, until `stop`."""

    def __init__(self, context: Any, plan: RoomPlan) -> None:
        self.name = plan.spec.name
        self.num_starts = 0
        self._context = context
        self._plan = plan
        self._process: BaseProcess | None = None
        self._orders: Connection | None = None
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()  # of orders, which go out one at a time
        self._watcher = threading.Thread(target=self._watch, name=self.name, daemon=True)

    def start(self) -> None:
        self._launch()
        self._watcher.start()

    @property
    def pid(self) -> int:
        process = self._process
        assert process is not None, "asked before it was started"
        assert process.pid is not None, "a started process has an id"
        return process.pid

    def order(self, method: str, *arguments: Any) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._orders is not None:
                self._orders.send_bytes(json.dumps([method, arguments]).encode())

    def stop(self) -> None:
        self._is_stopping.set()
        while self._watcher.is_alive():  # it may be starting the next one at this moment
            process = self._process
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            self._watcher.join(_AGAIN_S)

    def _launch(self) -> None:
        ours, theirs = self._context.Pipe()
        is_restarted = self.num_starts > 0
        process = self._context.Process(target=run_room, args=(self._plan, is_restarted, theirs), name=self.name)
        process.start()
        theirs.close()
        with self._lock:
            former, self._orders = self._orders, ours
            self._process = process
        if former is not None:
            former.close()
        self.num_starts += 1

    def _watch(self) -> None:
        while True:
            process = self._process
            assert process is not None, "watched before it was started"
            wait([process.sentinel])
            process.join()
            if self._is_stopping.wait(_AGAIN_S):
                return
            self._launch()


def run_room(plan: RoomPlan, is_restarted: bool, orders: Connection) -> None:
    """Be this process: build the actor without Ray, and do what is ordered until the other end of the pipe closes."""
    _shift_clock(plan)
    context: Any = SimpleNamespace(was_current_actor_reconstructed=is_restarted)
    ray.get_runtime_context = lambda: context
    actor_class = getattr(importlib.import_module(plan.module), plan.class_name)
    actor = actor_class.__ray_metadata__.modified_class(*plan.arguments, plan.spec)
    if actor.failure() is not None:
        raise SystemExit(_FAILED)
    if is_restarted and hasattr(actor, "serve_models"):  # told by the driver of a cluster
        actor.serve_models(next(one for one in plan.arguments if isinstance(one, tuple) and _are_models(one)))
    while True:
        try:
            method, arguments = json.loads(orders.recv_bytes())
        except (EOFError, OSError):
            return
        with contextlib.suppress(Exception):  # a router that is not up; who ordered looks at what follows
            getattr(actor, method)(*(tuple(one) if isinstance(one, list) else one for one in arguments))


def _are_models(argument: tuple[Any, ...]) -> bool:
    return bool(argument) and type(argument[0]).__name__ == "ServedDeployment"


def _shift_clock(plan: RoomPlan) -> None:
    path, true_time = plan.spec.addresses.folder / f"{plan.spec.name}.clock", time.time
    path.touch()
    file = path.open("r")

    def shifted() -> float:
        file.seek(0)
        return true_time() + float(file.read() or 0.0)

    time.time = shifted


def when_true(holds: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """Wait until it holds; return False where it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
    return True
