"""Commands of a worker's logic to its engine and copier, and the events that come back.

Those made once per iteration are structs: they take a fifth of a frozen dataclass's time.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.request import Request, SampledToken, TokenLogprob
from alignedserve.messages.caches import ArenaOffered, BlockCopy, BlockRun
from alignedserve.messages.gateways import TokenDelta


@dataclass(frozen=True, slots=True)
class Addition:
    """A request that enters the engine. The cache of its first `num_cached` tokens is in its blocks already."""

    request: Request
    generated_token_ids: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    num_cached: int = 0
    is_hidden: bool = False  # its cache is of layer inputs, not of keys and values
    is_reversed: bool = False  # it fills its blocks from the last slot to the first


@dataclass(frozen=True, slots=True)
class Swap:
    """The cache of one request, moved between blocks of the worker and host memory (keyed by the request there)."""

    request_id: RequestId
    num_tokens: int  # to move; on the way out, the last ones on the device
    block_ids: tuple[BlockId, ...]  # those that hold them, or all that the request has once they are back
    first_token: int = 0  # of its context, of those to move: where only a part is moved
    is_reversed: bool = False  # as in Addition


@dataclass(frozen=True, slots=True)
class Swaps:
    """Moves between the worker's blocks and host memory, made first in an iteration."""

    forgotten: tuple[RequestId, ...]  # whose copies on the host are no longer needed
    outs: tuple[Swap, ...]
    ins: tuple[Swap, ...]  # into blocks that `outs` may have left


@dataclass(frozen=True, slots=True)
class BlockReplacement:
    """A block of a sequence in whose place it reads another from now on, with the same tokens and keys and values."""

    request_id: RequestId
    place: int  # in its block table
    block_id: BlockId


class BlockCopied(NamedTuple):
    """A copy of one block of the worker's storage to another, read before the iteration writes anything."""

    source: BlockId
    target: BlockId


class StateKept(NamedTuple):
    """An edge within a sequence's slice, or at its end, where its states are left in blocks of their own as well."""

    request_id: RequestId
    num_tokens: int  # of its context, up to the edge
    block_ids: tuple[BlockId, ...]


class RunIteration(msgspec.Struct, frozen=True):
    """Command: one iteration: copies are read, then swaps, copies written, replacements, removals, additions,
    extensions, in this order, then one forward pass.

    An urgent one runs within the one in flight, whose pass stops between two layers for it and goes on after it; or
    alone, where that has ended meanwhile. They have no request in common.
    """

    removals: tuple[RequestId, ...]
    additions: tuple[Addition, ...]
    extensions: tuple[tuple[RequestId, tuple[BlockId, ...]], ...]
    slices: tuple[tuple[RequestId, int], ...]  # tokens to compute per request
    swaps: Swaps | None = None
    replacements: tuple[BlockReplacement, ...] = ()
    copies: tuple[BlockCopied, ...] = ()
    is_urgent: bool = False
    states: tuple[StateKept, ...] = ()
    drafts: tuple[tuple[RequestId, int], ...] = ()  # tokens that may be drafted of a request that decodes


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of some prompt tokens."""

    request_id: RequestId
    first_position: int
    entries: tuple[TokenLogprob, ...]


class IterationTimes(msgspec.Struct, frozen=True):
    """Parts of an iteration's time on the computing thread, in seconds; its start and end are on the clock of `now`."""

    started_s: float
    finished_s: float
    prepare_s: float  # removing, fetching and adding sequences, and building the batch
    forward_s: float  # the pass and its logits
    sampling_s: float
    attention_s: float = 0.0  # of the pass: attention of decoding sequences, where that can be measured
    straggler_share: float = 0.0  # of that time: there only because one sequence is longer than the others
    grammar_s: float | None = None  # waiting for the masks of rows under a grammar; None: not measured
    is_ahead: bool = False  # its decodes were launched before the tokens of the iteration before were known
    yielded_s: float = 0.0  # that its pass stood still for urgent iterations, in none of its parts
    turn_s: float = 0.0  # of an encoder of pictures, that ended before it began; in none of its parts

    @property
    def computed_s(self) -> float:
        """Seconds from start to end, without the time in which the iteration stood still."""
        return self.finished_s - self.started_s - self.yielded_s


@dataclass(frozen=True, slots=True)
class IterationCompleted:
    """Event: the iteration has ended. A failed request gave no usable logits, or has a reason of its own."""

    sampled: tuple[SampledToken, ...]  # in the order of each answer, where a request has several
    prompt_scores: tuple[PromptScores, ...] = ()
    failed: tuple[RequestId, ...] = ()
    reasons: tuple[tuple[RequestId, tuple[FailureKind, str]], ...] = ()  # of failed ones: why no token can follow
    # How many tokens a request has in `sampled` before the one sampled last, as its grammar left no choice of them, or
    # as they were drafted: it computed so many more than it was to, in the blocks that it has.
    forced: tuple[tuple[RequestId, int], ...] = ()
    # None from a stand-in that has no engine. Two iterations with the same outcome are equal, however long they took.
    times: IterationTimes | None = field(default=None, compare=False)
    is_urgent: bool = False  # as its command
    skipped: tuple[RequestId, ...] = ()  # requests without a token: the masks of heavy grammars were not there
    drafted: tuple[tuple[RequestId, int, int], ...] = ()  # tokens drafted of a request, and right ones

    @property
    def grammar_s(self) -> float | None:
        """Seconds that the iteration waited for grammars; None: that was not measured."""
        return None if self.times is None else self.times.grammar_s

    @property
    def turn_s(self) -> float:
        """Seconds of the turn of an encoder before the iteration; 0: there was none."""
        return 0.0 if self.times is None else self.times.turn_s

    def duration_s(self, started_s: float, now: float) -> float:
        """Return the time measured by the engine, else the time since the logic started the iteration."""
        return self.times.computed_s if self.times is not None else now - started_s


# --- copies, concurrent with iterations; an arena is named by the peer that offered it, or that it is offered to ---


@dataclass(frozen=True, slots=True)
class Load:
    """The cache of a request, on its way into blocks of this worker."""

    request_id: RequestId
    copy: BlockCopy
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Command: copy from this peer's arena, all in one transfer, and verify."""

    source: str
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class BlocksLoaded:
    """Event: a LoadBlocks is done. A request whose copy did not verify has undefined blocks."""

    source: str
    loads: tuple[Load, ...]
    refused: frozenset[RequestId]
    duration_s: float = 0.0
    is_reached: bool = True  # False: nothing could be read, which says nothing of the copies


@dataclass(frozen=True, slots=True)
class OffloadBlocks:
    """Command: copy a request's blocks into a peer's arena."""

    request_id: RequestId
    attempt: int
    block_ids: tuple[BlockId, ...]  # in the worker's storage
    target: str
    target_block_ids: tuple[BlockId, ...]
    generation: int
    lease_id: LeaseId | None = None
    num_before: int | None = None  # they follow so many blocks of a prefix, and each is summed by itself


@dataclass(frozen=True, slots=True)
class BlocksOffloaded:
    """Event: the copy is done; `runs` is None if this worker no longer owned the target's blocks."""

    command: OffloadBlocks
    runs: tuple[BlockRun, ...] | None


@dataclass(frozen=True, slots=True)
class RelayBlocks:
    """Command: copy from one arena to another, verified on the way."""

    request_id: RequestId
    attempt: int
    source: str
    copy: BlockCopy
    target: str
    target_block_ids: tuple[BlockId, ...]
    generation: int
    lease_id: LeaseId | None = None


@dataclass(frozen=True, slots=True)
class BlocksRelayed:
    """Event: the copy is done; `runs` is None if it did not verify, or this worker no longer owned the target."""

    command: RelayBlocks
    runs: tuple[BlockRun, ...] | None
    is_reached: bool = True  # False: nothing could be read, which says nothing of the copy


@dataclass(frozen=True, slots=True)
class MapArena:
    """Command: use the arena that this peer offers; leases of an earlier one are void."""

    peer: str
    offered: ArenaOffered
    stamps: bool = False  # it is a candidate buffer, whose blocks the writer stamps


@dataclass(frozen=True, slots=True)
class UnmapArena:
    """Command: stop using the arena of a peer that is gone."""

    peer: str


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """Command: allocate a buffer for this decode worker, in place of any earlier one. Answered by BufferOpened."""

    peer: str
    link_epoch: int


@dataclass(frozen=True, slots=True)
class CloseBuffer:
    """Command: free the buffer of a decode worker that is gone."""

    peer: str


@dataclass(frozen=True, slots=True)
class BufferOpened:
    """Event: the buffer is allocated; None: there is no memory for one, and the decode worker has none here."""

    peer: str
    link_epoch: int
    offered: ArenaOffered | None


def joined(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Join consecutive deltas of a request into one; only the last may end it."""
    results: list[TokenDelta] = []
    for delta in deltas:
        if results and results[-1].request_id == delta.request_id:
            before = results.pop()
            token_ids = before.token_ids + delta.token_ids
            delta = msgspec.structs.replace(
                delta,
                first_index=before.first_index,
                token_ids=token_ids,
                logprobs=before.logprobs + delta.logprobs,
                num_cached_tokens=before.num_cached_tokens + delta.num_cached_tokens,
            )
        results.append(delta)
    return results
