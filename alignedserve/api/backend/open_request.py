"""One request that a gateway has sent to a deployment, and its tokens in order."""

from alignedserve.api.backend.interface import RequestStream
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.messages.gateways import PromptScored, TokenDelta

# A request that is silent for this long is sent to the router again, which ignores it if all is well: no request waits
# for ever, whichever message was lost.
_RESEND_AFTER_S = 10.0
_MOST_RESEND_AFTER_S = 160.0  # of best effort, where the time doubles: thousands may wait for an hour
_RESEND_SOON_S = 2.0  # while tokens are missing before others, or were lost: what is under way elsewhere comes sooner
_TOKEN_BYTES = 16  # that are copied while a token is encoded


class OpenRequest:
    """One request that has not ended, and its tokens in order."""

    def __init__(self, request: Request, stream: RequestStream, now: float) -> None:
        self.is_sent = False  # to a router
        self.is_to_be_sent = False  # again, without a further wait
        self.stream = stream
        self.last_heard_s = now  # when new tokens last came
        self.last_worker: str | None = None  # whose tokens came last, until its link is lost
        self._last_sent_s = now
        self._resend_after_s = _RESEND_AFTER_S
        self._is_asked_soon = False  # a chat whose worker was lost: it is sent again soon
        self._last_early_s = now  # when tokens behind a gap last came
        self._gap_told_s: float | None = None  # when it was sent again for a gap of which no token has come since
        self._has_last = False
        self.request = request
        self._token_ids: list[int] = []  # delivered, without gap
        self._num_prompt_logprobs = 0
        self._out_of_order: dict[int, TokenDelta] = {}  # behind a gap, by first index
        self._out_of_order_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    @property
    def is_best_effort(self) -> bool:
        return not self.request.is_real_time

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        request, sampling = self.request, self.request.sampling
        num_token_ids = request.prompt_len + self.num_tokens + len(sampling.allowed_token_ids)
        return _TOKEN_BYTES * num_token_ids + len(sampling.grammar) + sum(len(one.content) for one in request.pictures)

    @property
    def is_complete(self) -> bool:
        return self._has_last and self.stream.has_prompt_logprobs

    @property
    def has_gap(self) -> bool:
        return bool(self._out_of_order)

    def lose_worker(self) -> None:
        """Note that the link to its worker is lost. A chat is sent to the router at once, and soon again: that may take
        it for served until it hears from the worker itself that the answer has ended."""
        self.last_worker = None
        self._is_asked_soon = not self.is_best_effort

    def tell_gap(self, now: float) -> bool:
        """Note that it is sent to the router again. Return whether it was for the same gap before, and its worker goes
        on behind that: only a new attempt closes it. What came behind it is then forgotten, and that worker."""
        is_lasting = self.has_gap and self._gap_told_s is not None and self._last_early_s > self._gap_told_s
        if is_lasting:
            self._out_of_order.clear()
            self.last_worker = None
        self._gap_told_s = now if self.has_gap else None
        return is_lasting

    def is_resend_due(self, now: float) -> bool:
        """Return whether it has been silent too long; True starts the next wait, of best effort twice as long."""
        if self.last_heard_s > self._last_sent_s:
            self._resend_after_s = _RESEND_AFTER_S
        is_soon = self.has_gap or self._is_asked_soon
        wait_s = min(_RESEND_SOON_S, self._resend_after_s) if is_soon else self._resend_after_s
        is_silent = now - max(self.last_heard_s, self._last_sent_s) > wait_s
        is_due = is_silent or self.is_to_be_sent
        if is_due:
            self._last_sent_s, self.is_to_be_sent, self._is_asked_soon = now, False, False
            if self.is_best_effort and is_silent:
                self._resend_after_s = min(2.0 * self._resend_after_s, _MOST_RESEND_AFTER_S)
        return is_due

    @property
    def resumed_token_ids(self) -> tuple[int, ...]:
        """Tokens after which it may be resumed: none while prompt log-probabilities are missing."""
        return tuple(self._token_ids) if self.stream.has_prompt_logprobs else ()

    def accept(self, delta: TokenDelta, now: float) -> None:
        if delta.first_index > self.num_tokens:
            if delta.first_index <= self.request.sampling.max_tokens:
                self._out_of_order[delta.first_index], self._last_early_s = delta, now
            return
        self._deliver(delta, now)
        while self._out_of_order and min(self._out_of_order) <= self.num_tokens:
            self._deliver(self._out_of_order.pop(min(self._out_of_order)), now)

    def accept_prompt_logprobs(self, message: PromptScored, now: float) -> None:
        self._out_of_order_logprobs[message.first_position - 1] = message.entries
        while self._out_of_order_logprobs:
            first = min(self._out_of_order_logprobs)
            if first > self._num_prompt_logprobs:
                break
            new = self._out_of_order_logprobs.pop(first)[self._num_prompt_logprobs - first :]
            if new:
                self._num_prompt_logprobs += len(new)
                self.last_heard_s = now
                self.stream.push_prompt_logprobs(new)
        if self.request.sampling.max_tokens == 0 and self.stream.has_prompt_logprobs and not self._has_last:
            # No token was asked for: the answer is complete with its prompt log-probabilities, even before a delta.
            self._has_last = True
            self.stream.push((), (), FinishReason.LENGTH)

    def _deliver(self, delta: TokenDelta, now: float) -> None:
        num_known = self.num_tokens - delta.first_index
        new = delta.token_ids[num_known:]
        # A repeat that ends before the delivered tokens is stale, and so is its end.
        is_stale = not new and (delta.finish_reason is None or num_known > len(delta.token_ids))
        if self._has_last or is_stale:
            return
        if not self._token_ids:  # a later attempt counts answers among its hits
            self.stream.num_cached_tokens = min(delta.num_cached_tokens, self.request.prompt_len)
            self.stream.embedding = delta.embedding
        self._token_ids += new
        self.last_heard_s, self._gap_told_s, self._is_asked_soon = now, None, False
        self._has_last = delta.finish_reason is not None
        self.stream.push(new, delta.logprobs[num_known:], delta.finish_reason)
