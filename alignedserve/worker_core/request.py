"""The part of a request's record that every worker keeps, whichever phase it serves."""

import enum
from dataclasses import dataclass, field

import msgspec

from alignedserve.core.lifecycle import end_token_ids
from alignedserve.core.picture import settled_len
from alignedserve.core.request import FinishReason, Request, SampledToken
from alignedserve.messages.gateways import TokenDelta
from alignedserve.messages.workers import PrefillRequest, RequestPreempted, SetPredictedLength


class CacheStage(enum.Enum):
    """Where a request at a worker is, by its cache. The policy decides what a request HERE does."""

    WAITING = "waiting"  # for blocks
    ASKING = "asking"  # blocks are held, and the pool was asked for its cache
    LOADING = "loading"  # its cache comes from the pool
    HERE = "here"
    LEAVING = "leaving"  # it is to be handed over, or is being copied to where it goes
    AWAY = "away"  # in the pool, under a lease or as its request
    PREFETCHING = "coming"  # there, and on its way into a prefill worker's memory
    BUFFERED = "buffered"  # in a prefill worker's memory
    RETURNING = "returning"  # there, and on its way back to the pool


_FOLLOWING = {
    CacheStage.WAITING: (CacheStage.ASKING, CacheStage.HERE),
    CacheStage.ASKING: (CacheStage.LOADING, CacheStage.HERE),
    CacheStage.LOADING: (CacheStage.HERE,),
    CacheStage.HERE: (CacheStage.LEAVING,),
    CacheStage.LEAVING: (CacheStage.HERE, CacheStage.AWAY),
    CacheStage.AWAY: (CacheStage.ASKING, CacheStage.HERE, CacheStage.PREFETCHING),
    CacheStage.PREFETCHING: (CacheStage.BUFFERED, CacheStage.AWAY),
    CacheStage.BUFFERED: (CacheStage.AWAY, CacheStage.RETURNING),
    CacheStage.RETURNING: (CacheStage.BUFFERED,),
}


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """One attempt of a request on a worker. Later attempts wait in `successor` until this one has left."""

    request: Request
    attempt: int
    generated_token_ids: list[int]
    granted_s: float = field(default=0.0, kw_only=True)  # when it came to this worker
    predicted_output_len: float | None = field(default=None, kw_only=True)
    stage: CacheStage = field(default=CacheStage.HERE, kw_only=True)
    is_prefilled: bool = field(default=False, kw_only=True)  # the router knows that its prompt is computed
    num_hit_tokens: int = field(default=0, kw_only=True)  # of its context, taken from the prefix cache as it entered
    is_aborted: bool = field(default=False, kw_only=True)  # but something still reads or writes its blocks
    successor: PrefillRequest | None = field(default=None, kw_only=True)
    successor_s: float = field(default=0.0, kw_only=True)  # when it came
    num_received: int = field(init=False)  # generated tokens that it came with
    context_len: int = field(init=False)  # prompt and generated tokens; the next iteration reads or computes all
    max_context_len: int = field(init=False)
    _end_token_ids: frozenset[int] | None = field(init=False, default=None)  # None: not asked for yet
    _prompt_keys: tuple[int, ...] = field(init=False)  # as the prefix cache knows its prompt
    _prompt_len: int = field(init=False)

    @property
    def is_real_time(self) -> bool:
        return self.request.is_real_time

    def __post_init__(self) -> None:
        # Kept, not worked out: they are read for every request in every iteration.
        self.num_received = len(self.generated_token_ids)
        self._prompt_len = self.request.prompt_len
        self.context_len = self._prompt_len + len(self.generated_token_ids)
        self.max_context_len = self.request.max_context_len
        self._prompt_keys = self.request.cache_keys

    def append(self, token: SampledToken, eos_token_ids: frozenset[int]) -> TokenDelta:
        """Add the token sampled from its whole context; return the message part for its gateway, if the client wants
        tokens."""
        request_id, token_id, logprob, embedding = token
        index = self.context_len - self._prompt_len
        num_cached_tokens = 0 if index else self.num_hit_tokens
        if not index and self.context_len == self.max_context_len:
            return TokenDelta(request_id, 0, (), (), FinishReason.LENGTH, num_cached_tokens, embedding)
        if self._end_token_ids is None:
            self._end_token_ids = end_token_ids(self.request, eos_token_ids)
        self.generated_token_ids.append(token_id)
        self.context_len += 1
        finished = None
        if token_id in self._end_token_ids:
            finished = FinishReason.STOP
        elif self.context_len >= self.max_context_len:
            finished = FinishReason.LENGTH
        logprobs = () if logprob is None else (logprob,)
        return TokenDelta(request_id, index, (token_id,), logprobs, finished, num_cached_tokens)

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        prompt, prompt_len = self._prompt_keys, self._prompt_len
        if start >= prompt_len:
            return tuple(self.generated_token_ids[start - prompt_len : stop - prompt_len])
        generated = self.generated_token_ids[max(start - prompt_len, 0) : max(stop - prompt_len, 0)]
        return prompt[start:stop] + tuple(generated)

    def settled_len(self, num_cached: int) -> int:
        """Return how many of its first tokens, cached so far, are computed: of those of some pictures all, or none."""
        return settled_len(self.request.whole_runs, num_cached)

    def go(self, stage: CacheStage) -> None:
        assert stage in _FOLLOWING[self.stage], f"a request that is {self.stage.value} cannot be {stage.value}"
        self.stage = stage

    def is_up_to(self, attempt: int | None) -> bool:
        return attempt is None or self.attempt <= attempt

    def abort(self, attempt: int | None) -> bool:
        """Mark it aborted and drop its successor, each only up to `attempt`; return whether it is aborted by this."""
        if self.successor is not None and (attempt is None or self.successor.attempt <= attempt):
            self.successor = None
        if not self.is_up_to(attempt):
            return False
        self.is_aborted = True
        return True

    def set_predicted_length(self, message: SetPredictedLength) -> bool:
        """Set the prediction of this attempt, or of its successor: False then."""
        if self.attempt == message.attempt:
            self.predicted_output_len = message.predicted_output_len
            return True
        if self.successor is not None:
            self.successor = with_prediction(self.successor, message)
        return False

    def preempted(self, *, is_refused: bool = False) -> RequestPreempted:
        generated = tuple(self.generated_token_ids)
        return RequestPreempted(self.request.request_id, self.attempt, generated, handoff_refused=is_refused)


def urgent_at_s(request: Request, num_generated: int, token_s: float | None) -> float | None:
    """Return when waiting must end, so that the remaining tokens fit in at most half of the time; None: no deadline.

    `token_s`: from one token to the next; None: not known yet, and half of the time is kept.
    """
    deadline_s = request.slo.deadline_s
    if deadline_s is None:
        return None
    needed_s = deadline_s / 2
    if token_s is not None:
        needed_s = min((request.sampling.max_tokens - num_generated) * token_s, needed_s)
    return request.arrival_s + deadline_s - needed_s


def with_prediction(message: PrefillRequest, late: SetPredictedLength) -> PrefillRequest:
    """Return a waiting request with a later prediction, if that is of this attempt."""
    if (message.request.request_id, message.attempt) != (late.request_id, late.attempt):
        return message
    return msgspec.structs.replace(message, predicted_output_len=late.predicted_output_len)
