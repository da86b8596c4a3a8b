"""Waits for what an actor answers."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.core.errors import PeerLost


def answer_of(name: object, reference: Any, timeout_s: float) -> Any:
    """Return the result of a call. Raises PeerLost naming the one that was called when it does not answer."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except (RayError, TimeoutError) as error:
        raise PeerLost(f"{name} does not answer: {str(error).splitlines()[0]}") from error


def answers_so_far(references: Sequence[Any]) -> dict[Any, Any]:
    """Return the results of those calls that have ended, without waiting; None of those that failed."""
    ended = ray.wait(list(references), num_returns=len(references), timeout=0)[0] if references else []
    return {reference: _result(reference) for reference in ended}


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayError:
        return None
