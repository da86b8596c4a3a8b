"""Waits for what an actor answers."""

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
