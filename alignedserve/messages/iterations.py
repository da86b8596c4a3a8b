"""What a worker's logic asks of its engine for one iteration, and what comes back."""

from dataclasses import dataclass

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SampledToken, TokenLogprob
from alignedserve.messages.events import SendTo
from alignedserve.messages.links import ArenaOffered, BlocksReserved, Handoff, TokenDelta, TokensEmitted


@dataclass(frozen=True, slots=True)
class Addition:
    """A request that enters the engine. With a handoff, its cache is fetched and verified first."""

    request: Request
    generated_token_ids: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    handoff: Handoff | None = None


@dataclass(frozen=True, slots=True)
class RunIteration:
    """Command: one iteration. Performed in this order: removals, additions, extensions, then one forward pass."""

    removals: tuple[RequestId, ...]
    additions: tuple[Addition, ...]
    extensions: tuple[tuple[RequestId, tuple[BlockId, ...]], ...]
    slices: tuple[tuple[RequestId, int], ...]  # tokens to compute per request


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of some prompt tokens."""

    request_id: RequestId
    first_position: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class IterationCompleted:
    """Event: the iteration is over. A refused request never entered the engine; a failed one gave no usable logits."""

    sampled: tuple[SampledToken, ...]
    prompt_scores: tuple[PromptScores, ...] = ()
    refused: tuple[RequestId, ...] = ()
    failed: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadBlocks:
    """Command: copy a finished prefill into the arena, beside whatever iterations run."""

    request_id: RequestId
    block_ids: tuple[BlockId, ...]  # in the worker's storage
    reserved: BlocksReserved


@dataclass(frozen=True, slots=True)
class MapArena:
    """Command: map the arena that the pool offers; leases of an earlier one are void."""

    offered: ArenaOffered


def group_by_gateway(deltas: list[tuple[str, TokenDelta]]) -> list[SendTo]:
    """One TokensEmitted for each gateway address, in order of first appearance."""
    grouped: dict[str, list[TokenDelta]] = {}
    for address, delta in deltas:
        grouped.setdefault(address, []).append(delta)
    return [SendTo(address, TokensEmitted(tuple(items))) for address, items in grouped.items()]
