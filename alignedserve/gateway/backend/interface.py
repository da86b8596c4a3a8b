"""The port between HTTP and the cluster: submit a request, read its output in order, give up on it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.gateway.errors import GenerationError
from alignedserve.messages.gateways import ClusterStatus


@dataclass(frozen=True, slots=True)
class Output:
    """Everything new of one answer since the last read."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    prompt_scores: tuple[TokenLogprob, ...] = ()  # all at once, with the first output, when asked for
    finish_reason: FinishReason | None = None  # set on the last output


class CompletionBackend(Protocol):
    """Serves requests. All methods run on one event loop and return at once; waiting happens in the stream."""

    def submit(self, request: Request) -> "RequestStream":
        """Begin. Raises Unavailable when the request cannot even be handed over."""

    def abort(self, request_id: RequestId) -> None:
        """Stop and free everything. May be repeated; finished and unknown ids are ignored."""

    def status(self) -> ClusterStatus | None:
        """What the cluster last said of itself; None while it is not connected."""


class RequestStream:
    """One answer: an async iterator of Output, ending after `finish_reason` or with a GenerationError.

    The backend pushes, one reader iterates. Tokens that arrive while the reader is busy come as one Output. Whoever
    stops reading early must abort at the backend.
    """

    def __init__(self, request: Request) -> None:
        is_scored = request.sampling.num_prompt_logprobs is not None
        self._num_scores_missing = request.prompt_len - 1 if is_scored else 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._scores: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None
        self._is_over = False  # the reader has seen the end
        self._error: GenerationError | None = None
        self._ready = asyncio.Event()
        self._wake: Callable[[], None] = self._ready.set

    # --- for the backend

    def push(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Add output, in order."""
        self._tokens += token_ids
        self._logprobs += logprobs
        self._finish_reason = finish_reason
        self._wake()

    def push_scores(self, entries: tuple[TokenLogprob, ...]) -> None:
        """Add prompt scores, in order."""
        self._scores += entries
        self._num_scores_missing -= len(entries)
        self._wake()

    def fail(self, error: GenerationError) -> None:
        """End the answer; what was pushed before is still read."""
        self._error = error
        self._wake()

    @property
    def num_scores_missing(self) -> int:
        """Prompt scores that were asked for and have not come; until they have, no output is given."""
        return self._num_scores_missing

    # --- for the reader

    def take(self) -> Output | None:
        """Everything that has come since the last call, None when nothing has. Raises GenerationError."""
        if self._num_scores_missing > 0 or not (self._tokens or self._scores or self._finish_reason is not None):
            if self._error is not None:
                raise self._error
            return None
        output = Output(tuple(self._tokens), tuple(self._logprobs), tuple(self._scores), self._finish_reason)
        self._tokens.clear()
        self._logprobs.clear()
        self._scores.clear()
        self._is_over = self._finish_reason is not None
        self._finish_reason = None
        return output

    def call_when_ready(self, wake: Callable[[], None]) -> None:
        """Call this, instead of waking an iteration, whenever `take` may have something."""
        self._wake = wake

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Output:
        if self._is_over:
            raise StopAsyncIteration
        while (output := self.take()) is None:
            self._ready.clear()
            await self._ready.wait()
        return output
