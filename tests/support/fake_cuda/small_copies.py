"""Small staging, so that copies of toy engines take turns in it as those of large ones do."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from alignedserve.runtime.kv.direct_copies import DirectCopies
from alignedserve.runtime.kv.staged_copies import StagedCopies

_MUCH = 1 << 20  # more than toy engines copy at once


@contextlib.contextmanager
def small_copies(staged_bytes: int = 4096, *, are_listed: bool | None = None) -> Iterator[None]:
    """Have every copy made within the context stage so many bytes at a time.

    `are_listed`: blocks are copied by lists and straight from GPU to GPU, or gathered; None: as their sizes say.
    """
    least = {True: 0, False: _MUCH}
    staged = {} if are_listed is None else {"least_listed_bytes": least[are_listed]}
    direct = {} if are_listed is None else {"least_straight_bytes": least[are_listed]}
    with (
        mock.patch.dict(StagedCopies.__init__.__kwdefaults__, staged_bytes=staged_bytes, **staged),
        mock.patch.dict(DirectCopies.__init__.__kwdefaults__, staged_bytes=staged_bytes, **direct),
    ):
        yield
