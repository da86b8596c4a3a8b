"""Answers what a cluster on this host does now: its processes are asked, and whoever is silent is left out.

Nothing waits: a question is begun, and looked at until its answers are there or its time is over.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.orders import DeploymentReport, ProcessReport, StatusReport
from alignedserve.cluster.process_health import Health, ProcessState
from alignedserve.cluster.ray_polls import has_ended, have_all_ended

_PATIENCE_S = 2.0
_STATES = {ProcessState.UP: "up", ProcessState.STARTING: "starting", ProcessState.ENDED: "starting again"}


class StatusQuestion:
    """One question: what each process takes of memory, and the routers' last reports."""

    def __init__(self, actors: Mapping[str, Any], gateway: Any, now: float) -> None:
        """`actors`: all of the cluster. `gateway`: the one of them that is asked for the routers' reports."""
        self._memory = {name: actor.memory_bytes.remote() for name, actor in actors.items()}
        self._loads = gateway.cluster_statuses.remote()
        self._ends_s = now + _PATIENCE_S

    def is_over(self, now: float) -> bool:
        """Return whether all have answered, or their time is over."""
        return have_all_ended([self._loads, *self._memory.values()]) or now >= self._ends_s

    def report(self, url: str, healths: Mapping[str, Health], reports: tuple[DeploymentReport, ...]) -> StatusReport:
        """Return what is known. `reports`: of the deployments."""
        memory = psutil.virtual_memory()
        return StatusReport(
            url=url,
            deployments=reports,
            loads=_answer(self._loads) or {},
            processes=tuple(self._processes(healths)),
            total_bytes=memory.total,
            available_bytes=memory.available,
        )

    def _processes(self, healths: Mapping[str, Health]) -> Iterator[ProcessReport]:
        for name, asked in self._memory.items():
            health = healths.get(name, Health())
            state = _STATES.get(health.state, "fails")
            yield ProcessReport(name, state, health.problem, _answer(asked))


def _answer(asked: Any) -> Any:
    """Return an answer; None for one that has not come, or of a process that is lost."""
    try:
        return ray.get(asked) if has_ended(asked) else None
    except RayError:
        return None
