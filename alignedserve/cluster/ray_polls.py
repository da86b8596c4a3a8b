"""Calls of actors: looked at without waiting, or waited for."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.core.errors import PeerLost


def has_ended(reference: Any) -> bool:
    """Return whether a call has its answer or has failed, so that `ray.get` waits for nothing."""
    return bool(ray.wait([reference], timeout=0)[0])


def have_all_ended(references: Sequence[Any]) -> bool:
    """Return whether all of these calls have their answers or have failed."""
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
    return {reference: _result(reference) for reference in ended}


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayError:
        return None
