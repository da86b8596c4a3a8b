"""The port between HTTP and the cluster: submit a request, read its tokens in order, abort it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from alignedserve.api.errors import GenerationError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.messages.gateways import ClusterStatus


@dataclass(slots=True)
class GeneratedTokens:
    """New tokens of one request since the last read."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all at once, with the first tokens, when asked for
    finish_reason: FinishReason | None = None  # set on the last tokens


class CompletionBackend(Protocol):
    """Serves requests. All methods run on one event loop and return at once; waiting happens in the stream."""

    def submit(self, request: Request) -> "RequestStream":
        """Begin to serve the request. Raises Unavailable when it cannot be submitted."""

    def abort(self, request_id: RequestId) -> None:
        """Stop and free everything. May be repeated; finished and unknown ids are ignored."""

    def status(self) -> ClusterStatus | None:
        """Return the cluster's last report; None while it is not connected."""

    def num_answers(self) -> Mapping[str, int]:
        """Return how many requests have had their last token from each worker."""


class RequestStream:
    """Tokens of one request: an async iterator that ends after `finish_reason` or with a GenerationError.

    The backend pushes, one reader iterates. Tokens that arrive while the reader is busy come as one item. A reader
    that stops early must abort the request at the backend.
    """

    def __init__(self, request: Request) -> None:
        # Set by the backend with the first tokens, or the end where there are none.
        self.num_cached_tokens = 0  # of its prompt, taken from the prefix cache
        self.embedding = b""  # of its prompt, float32, where asked for
        self.compute_s = 0.0  # that workers have told: what they computed for it so far
        self._num_prompt_logprobs_missing = 0
        if request.sampling.num_prompt_logprobs is not None:
            self._num_prompt_logprobs_missing = request.prompt_len - 1
        self._pending = GeneratedTokens()
        self._is_exhausted = False  # the reader has seen the end
        self._error: GenerationError | None = None
        self._ready = asyncio.Event()
        self._wake_reader: Callable[[], None] = self._ready.set

    # --- for the backend

    def push(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
    ) -> None:
        self._pending.token_ids += token_ids
        self._pending.logprobs += logprobs
        self._pending.finish_reason = finish_reason
        self._wake_reader()

    def push_prompt_logprobs(self, entries: tuple[TokenLogprob, ...]) -> None:
        self._pending.prompt_logprobs += entries
        self._num_prompt_logprobs_missing -= len(entries)
        self._wake_reader()

    def fail(self, error: GenerationError) -> None:
        self._error = error
        self._wake_reader()

    @property
    def has_prompt_logprobs(self) -> bool:
        """True once the requested prompt log-probabilities have come; until then nothing can be read."""
        return self._num_prompt_logprobs_missing <= 0

    # --- for the reader

    def read_new(self) -> GeneratedTokens | None:
        """Return the tokens since the last call, None when there are none. Raises GenerationError."""
        tokens = self._pending
        is_empty = not (tokens.token_ids or tokens.prompt_logprobs) and tokens.finish_reason is None
        if is_empty or not self.has_prompt_logprobs:
            if self._error is not None:
                raise self._error
            return None
        self._pending = GeneratedTokens()
        self._is_exhausted = tokens.finish_reason is not None
        if self._error is not None:  # it is for the next read
            self._wake_reader()
        return tokens

    def call_when_ready(self, wake_reader: Callable[[], None]) -> None:
        """Call this, instead of waking an iteration, whenever `read_new` may return tokens."""
        self._wake_reader = wake_reader

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> GeneratedTokens:
        if self._is_exhausted:
            raise StopAsyncIteration
        while (tokens := self.read_new()) is None:
            self._ready.clear()
            await self._ready.wait()
        return tokens
