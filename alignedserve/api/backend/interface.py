"""The port between HTTP and the cluster: submit a request, read its tokens in order, abort it."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from alignedserve.api.errors import GenerationError, GenerationFailed, Unservable
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, SamplingParams, TokenLogprob
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
    """Tokens of one request: an async iterator that ends after `finish_reason` or with a GenerationError. The backend
    pushes, one reader iterates. Tokens for a busy reader come as one item. A reader that stops early must abort the
    request at the backend."""

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


_PAUSE_S = 0.5
_MISSING_PAUSE_S = 0.05  # while something is not there yet: a start waits for it
_TIMEOUT_S = 30.0
_MOST_FAILURES = 3  # in a row, of a kind that waiting does not mend


def missing_peer(status: ClusterStatus | None) -> str | None:
    """Return what no request can be served without, by a router's last report; None: all of it is there."""
    if status is None:
        return "the router is not connected"
    if status.num_decode_workers == 0:
        return "no worker that decodes is registered"
    if status.num_prefill_workers == 0:
        return "no worker for prompts is registered"
    if status.num_poolless_workers == status.num_prefill_workers:
        return "no KV pool is registered to which workers for prompts could give what they compute"
    return None


class ReadinessProbe:
    """Knows whether the cluster generates tokens. `run` until cancelled."""

    def __init__(self, backend: CompletionBackend, *, token_id: int, reply_to: str) -> None:
        self._backend = backend
        self._token_id = token_id
        self._reply_to = reply_to
        self._problem: str | None = "no canary token has come through yet"
        self._num_failures = 0  # in a row, of the model itself

    def missing(self) -> str | None:
        """Return the reason why the system is not ready; None when it is."""
        return self._missing_peer() or self._problem

    @property
    def is_hopeless(self) -> bool:
        """Return whether the model itself fails at every try, as one does that computes no numbers."""
        return self._num_failures >= _MOST_FAILURES

    async def run(self, pause_s: float = _PAUSE_S) -> None:
        while True:
            if self._missing_peer() is not None:
                self._problem = "no canary token has come through since the cluster changed"
            elif self._problem is not None:
                self._problem, has_failed = await self._probe()
                self._num_failures = self._num_failures + 1 if has_failed else 0
            await asyncio.sleep(pause_s if self._missing_peer() is None else min(pause_s, _MISSING_PAUSE_S))

    def _missing_peer(self) -> str | None:
        return missing_peer(self._backend.status())

    async def _probe(self) -> tuple[str | None, bool]:
        request = Request(
            request_id=RequestId(f"canary-{secrets.token_hex(8)}"),
            prompt_token_ids=(self._token_id,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            reply_to=self._reply_to,
            arrival_s=time.monotonic(),
            priority=-1,
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stream = self._backend.submit(request)
                async for _ in stream:
                    return None, False
        except TimeoutError:
            return "the canary token did not come in time", False
        except GenerationError as error:
            reason = error.reason if isinstance(error, GenerationFailed) else ""
            return f"the canary token failed: {reason or error}", isinstance(error, GenerationFailed | Unservable)
        finally:
            self._backend.abort(request.request_id)
        return "the canary token did not come", False
