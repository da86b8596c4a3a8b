"""The prefill worker's records."""

import enum
from dataclasses import dataclass

from alignedserve.core.ids import BlockId
from alignedserve.core.progress import finish_reason
from alignedserve.core.request import FinishReason, Request, SampledToken
from alignedserve.messages.links import Handoff, PrefillRequest, ReturnRequest, TokenDelta


class JobStage(enum.Enum):
    """Where a job is. Blocks are held from ASKING or COMPUTING until its end."""

    WAITING = "waiting"  # no blocks yet
    ASKING = "asking"  # the pool was asked for a copy of an earlier attempt
    LOADING = "loading"  # its copy comes from the pool
    COMPUTING = "computing"  # in the engine, or about to enter
    LEAVING = "leaving"  # computed; waits for room elsewhere, or is being copied there


@dataclass(slots=True)
class PrefillJob:
    """One request on this worker."""

    request: Request
    attempt: int
    generated_token_ids: tuple[int, ...]  # emitted before (recompute) and, once computed, the new one
    num_remaining: int  # tokens not yet computed
    stage: JobStage = JobStage.WAITING
    block_ids: tuple[BlockId, ...] = ()
    is_again: bool = False  # given out before
    has_copy: bool = False  # the pool may keep a copy of it from then
    handoff: Handoff | None = None  # the pool's copy of an earlier attempt, to begin from
    bypass_to: str | None = None  # the decode worker that it is to be offered first
    target: str | None = None  # where it leaves for: the pool, or that decode worker
    is_taken: bool = False  # by a decode worker: what leaves for the pool now is a copy
    is_copying: bool = False  # the transfer thread reads its blocks: they must not be freed
    is_written: bool = False  # offered to its target, which may have taken it already
    is_aborted: bool = False
    successor: PrefillRequest | None = None  # the same request, given again while this life of it was ending

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return self.request.prompt_len + len(self.generated_token_ids)

    @property
    def context_len(self) -> int:
        """Tokens whose cache its blocks hold once it is computed."""
        return self.num_tokens - (self.stage is JobStage.LEAVING)

    def sampled(self, token: SampledToken, eos_token_ids: frozenset[int]) -> TokenDelta:
        """Its context is computed and this is its next token: note it, and say what the gateway is told."""
        index = len(self.generated_token_ids)
        request_id = self.request.request_id
        if self.request.sampling.max_tokens == 0:  # only the prompt was to be scored
            return TokenDelta(request_id, index, (), (), FinishReason.LENGTH)
        self.generated_token_ids = (*self.generated_token_ids, token.token_id)
        finished = finish_reason(self.request, token.token_id, index + 1, eos_token_ids)
        logprobs = (token.logprob,) if token.logprob is not None else ()
        return TokenDelta(request_id, index, (token.token_id,), logprobs, finished)

    def is_leaving_for(self, peer: str, attempt: int) -> bool:
        """Whether it waits for this peer's word about this attempt."""
        is_waiting = self.stage is JobStage.LEAVING and not self.is_copying
        return is_waiting and (self.target, self.attempt) == (peer, attempt)

    def num_usable(self, handoff: Handoff) -> int:
        """How many of its first tokens have their cache in this copy; at least one is always left to compute.

        What an earlier attempt generated and the client never saw may differ from what the client has.
        """
        num_usable = min(handoff.copy.context_len, self.num_tokens - 1)
        num_generated = max(num_usable - self.request.prompt_len, 0)
        is_same = (
            handoff.request.prompt_token_ids == self.request.prompt_token_ids
            and handoff.generated_token_ids[:num_generated] == self.generated_token_ids[:num_generated]
        )
        return num_usable if is_same else 0


@dataclass(slots=True)
class Returning:
    """An evicted request on its way from a candidate buffer back to the pool."""

    peer: str  # the decode worker that evicted it
    life: int  # of that worker's link
    message: ReturnRequest
    has_room: bool = False  # the pool gave it blocks
    is_written: bool = False  # offered to the pool, which may have taken it already
