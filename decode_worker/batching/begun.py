"""Common parts of the two kinds of running batch."""

from collections.abc import Collection
from typing import NamedTuple

from alignedserve.core.ids import BlockId
from alignedserve.messages.iterations import RunIteration
from decode_worker.held_requests import HeldRequest
from decode_worker.state import Loading, RunningRequest

# A request is admitted only if all in the batch can then generate so many tokens without an eviction.
FORESEEN_TOKENS = 32

BatchMember = RunningRequest | HeldRequest


class Begun(NamedTuple):
    """An iteration that begins, and candidates whose caches are to be loaded beside it."""

    command: RunIteration | None  # None: only they
    members: Collection[BatchMember]
    has_changed: bool = True  # other members than in the iteration before
    loads: tuple[Loading, ...] = ()


class Leaving(NamedTuple):
    """Remainder of a request that was taken out of the batch, to be copied out."""

    block_ids: tuple[BlockId, ...]
    num_cached: int
    first_token_s: float
    last_token_s: float | None  # None: not known
