"""Looks at calls of actors without waiting for them."""

from collections.abc import Sequence
from typing import Any

import ray


def has_ended(reference: Any) -> bool:
    """Return whether a call has its answer or has failed, so that `ray.get` waits for nothing."""
    return bool(ray.wait([reference], timeout=0)[0])


def have_all_ended(references: Sequence[Any]) -> bool:
    """Return whether all of these calls have their answers or have failed."""
    return not references or not ray.wait(list(references), num_returns=len(references), timeout=0)[1]
