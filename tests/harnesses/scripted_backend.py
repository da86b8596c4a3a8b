"""An in-process backend that answers by script, for tests and for measuring the gateway alone."""

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.api.backend.interface import RequestStream
from alignedserve.api.errors import GenerationError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.messages.gateways import ClusterStatus

IDLE_STATUS = ClusterStatus(num_prefill_workers=1, num_decode_workers=1, num_pool_blocks=64, num_worker_blocks=64)


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: tokens with pauses, then a finish or a failure."""

    token_ids: tuple[int, ...]
    first_token_delay_s: float = 0.0
    token_delay_s: float = 0.0  # 0: the next turn of the event loop
    tokens_per_step: int = 1
    failure: GenerationError | None = None  # instead of finishing
    num_cached_tokens: int = 0  # of the prompt
    compute_s: float = 0.0  # told with the first token
    held_until: asyncio.Event | None = None  # for which the second half of the tokens waits


class ScriptedBackend:
    """Answers every request by its script, truncated at `max_tokens`, with made-up constant log-probabilities."""

    def __init__(self, script: Callable[[Request], Script], status: ClusterStatus | None = IDLE_STATUS) -> None:
        self._script = script
        self._status = status
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []

    def submit(self, request: Request) -> RequestStream:
        """Begin to serve the request."""
        stream = RequestStream(request)
        self.submitted.append(request)
        task = asyncio.create_task(self._play(request, self._script(request), stream))
        self._running[request.request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request.request_id, None))
        return stream

    def abort(self, request_id: RequestId) -> None:
        """Stop serving the request."""
        task = self._running.pop(request_id, None)
        if task is not None:
            self.aborted.append(request_id)
            task.cancel()

    def status(self) -> ClusterStatus | None:
        """Return the status given at construction or by `set_status`."""
        return self._status

    def num_answers(self) -> Mapping[str, int]:
        """Return what a cluster of one worker would."""
        return {"scripted": len(self.submitted) - len(self._running) - len(self.aborted)}

    def set_status(self, status: ClusterStatus | None) -> None:
        self._status = status

    async def _play(self, request: Request, script: Script, stream: RequestStream) -> None:
        await asyncio.sleep(script.first_token_delay_s)
        stream.num_cached_tokens = min(script.num_cached_tokens, request.prompt_len)
        stream.compute_s = script.compute_s
        if request.sampling.wants_embedding:
            stream.embedding = made_up_embedding(request.prompt_token_ids)
        if request.sampling.num_prompt_logprobs is not None:
            num_top = request.sampling.num_prompt_logprobs
            stream.push_prompt_logprobs(
                tuple(made_up_logprob(token, num_top) for token in request.prompt_token_ids[1:])
            )
        token_ids = script.token_ids[: request.sampling.max_tokens]
        for first in range(0, len(token_ids), script.tokens_per_step):
            if first > 0:
                await asyncio.sleep(script.token_delay_s)
            if script.held_until is not None and 2 * first >= len(token_ids):
                await script.held_until.wait()
            step = token_ids[first : first + script.tokens_per_step]
            is_last = first + len(step) == len(token_ids) and script.failure is None
            stream.push(step, _logprobs(step, request), _finish_reason(request, script) if is_last else None)
        if script.failure is not None:
            stream.fail(script.failure)
        elif not token_ids:
            stream.push((), (), _finish_reason(request, script))


def made_up_embedding(prompt_token_ids: Sequence[int]) -> bytes:
    """Return three numbers: how many tokens the prompt has, its first and its last."""
    return struct.pack("<3f", len(prompt_token_ids), prompt_token_ids[0], prompt_token_ids[-1])


def made_up_logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((token_id + place, -0.5 if place == 0 else -float(place)) for place in range(num_top))
    return TokenLogprob(token_id, -0.5, top, 1)


def _logprobs(token_ids: tuple[int, ...], request: Request) -> tuple[TokenLogprob, ...]:
    num_top = request.sampling.num_logprobs
    return () if num_top is None else tuple(made_up_logprob(token_id, num_top) for token_id in token_ids)


def _finish_reason(request: Request, script: Script) -> FinishReason:
    return FinishReason.LENGTH if request.sampling.max_tokens <= len(script.token_ids) else FinishReason.STOP
