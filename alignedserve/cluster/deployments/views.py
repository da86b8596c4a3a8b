"""Tells gateways and batch worker which deployments there are, and gathers how each sees them, without waiting."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.logic import View
from alignedserve.cluster.ray_polls import have_all_ended
from alignedserve.runtime.model.served_deployment import DeploymentState, ServedDeployment

logger = logging.getLogger(__name__)

Answer = tuple[DeploymentState, ...] | None  # None: its process is lost, and Ray may start it again

_PAUSE_S = 1.0  # between two rounds while nothing changes


class Views:
    """The views of all who serve requests. One round of questions at a time; used on one thread."""

    def __init__(self, listeners: Callable[[], Iterable[Any]], clock: Callable[[], float]) -> None:
        """`listeners`: returns the actors of gateways and batch worker."""
        self._listeners = listeners
        self._clock = clock
        self._announced: tuple[ServedDeployment, ...] = ()
        self._round: tuple[tuple[ServedDeployment, ...], list[Any]] | None = None  # what was told, and the answers
        self._next_s = 0.0

    def announce(self, deployments: tuple[ServedDeployment, ...]) -> None:
        """Tell everyone at once; answers to what was told before do not count any more."""
        self._announced = deployments
        self._ask()

    def look(self, *, is_changing: bool) -> Mapping[str, View] | None:
        """Return the views by deployment; None: not all have answered. `is_changing`: ask again without a pause."""
        if self._round is None:
            if self._announced and (is_changing or self._clock() >= self._next_s):
                self._ask()
            return None
        told, asked = self._round
        if not have_all_ended(asked):
            return None
        self._round = None
        self._next_s = self._clock() + _PAUSE_S
        if told is not self._announced:
            self._ask()
            return None
        return combined([one.deployment_id for one in told], [_answer(one) for one in asked])

    def _ask(self) -> None:
        if self._round is None:
            listeners = list(self._listeners())
            self._round = (self._announced, [one.serve_models.remote(self._announced) for one in listeners])


def combined(deployment_ids: Iterable[str], answers: Sequence[Answer]) -> dict[str, View]:
    """Return the views of these deployments by their ids."""
    return {one: _view(one, answers) for one in deployment_ids}


def _answer(asked: Any) -> Answer:
    try:
        answer: Answer = ray.get(asked)
    except RayError as error:
        logger.debug("a gateway or the batch worker has not answered: %s", error)
        return None
    return answer


def _view(deployment_id: str, answers: Sequence[Answer]) -> View:
    states = [state for answer in answers for state in answer or () if state.deployment_id == deployment_id]
    missing = next((state.missing for state in states if state.missing is not None), None)
    if missing is None and len(states) < len(answers):
        missing = "a gateway or the batch worker is not up"
    num_unknown = sum(answer is None for answer in answers)  # each may hold a request
    return View(missing, sum(state.num_open for state in states) + num_unknown)
