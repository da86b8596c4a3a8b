"""Calls of actors, looked at without waiting or waited for, and the end of actors."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.start_observer import Patience
from alignedserve.core.errors import AlignedServeError, PeerLost, ResourceError


def has_ended(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def have_all_ended(references: Sequence[Any]) -> bool:
    return not references or not ray.wait(list(references), num_returns=len(references), timeout=0)[1]


def answer_of(name: object, reference: Any, timeout_s: float) -> Any:
    """Return the result of a call. Raises PeerLost naming the one that was called when it does not answer."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except (RayError, TimeoutError) as error:
        raise PeerLost(f"{name} does not answer: {str(error).splitlines()[0]}") from error


def answers_so_far(references: Sequence[Any]) -> dict[Any, Any]:
    """Return the results of calls that have ended, without waiting; None for a failed call."""
    ended = ray.wait(list(references), num_returns=len(references), timeout=0)[0] if references else []
    return {reference: answer_or_none(reference) for reference in ended}


def answer_or_none(reference: Any) -> Any:
    """Return the result of a call; None: it has failed, as its process is lost."""
    try:
        return ray.get(reference)
    except RayError:
        return None


def kill_actors(actors: Iterable[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)


class Starting:
    """Actors that come up."""

    def __init__(self, actors: Mapping[str, Any], patience: Patience) -> None:
        self._asked = {actor.failure.remote(): name for name, actor in actors.items()}
        self._patience = patience

    def look(self, timeout_s: float = 0.0) -> None:
        """Look whether more have come up, within this time. Raises the error of the first one that fails."""
        if self._asked:
            answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
            for reference in answered:
                _require_up(reference, self._asked.pop(reference))
        if self._asked and self._patience.is_over():
            names, seconds = ", ".join(self._asked.values()), self._patience.timeout_s
            raise ResourceError(f"{names} did not start, without progress for {seconds:.0f} s; see their logs")

    @property
    def is_over(self) -> bool:
        return not self._asked


def _require_up(reference: Any, name: str) -> None:
    try:
        failure: AlignedServeError | None = ray.get(reference)
    except RayError as error:
        raise ResourceError(f"{name} did not start: {str(error).splitlines()[0]}") from error
    if failure is not None:
        raise failure
