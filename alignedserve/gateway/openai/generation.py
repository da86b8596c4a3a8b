"""Runs all choices of one HTTP request and measures them; whatever is left open at the end is aborted."""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from alignedserve.core.request import FinishReason, Request
from alignedserve.gateway.backend.interface import Output, RequestStream
from alignedserve.gateway.openai.choice_decoder import ChoiceText, Piece
from alignedserve.gateway.openai.request_builder import Plan
from alignedserve.gateway.services import Services


class Generation:
    """Use with `async with`: entering submits every choice, leaving aborts those that have not ended."""

    def __init__(self, plan: Plan, services: Services) -> None:
        self.plan = plan
        self._services = services
        self._ready = asyncio.Event()
        self._choices: list[_Choice] = []
        self._open: list[_Choice] = []

    async def __aenter__(self) -> "Generation":
        self._services.capacity.take(len(self.plan.requests))
        try:
            for index, request in enumerate(self.plan.requests):
                stream = _submit(request, self._services)
                stream.call_when_ready(self._ready.set)
                self._choices.append(_Choice(index, request, stream, self.plan, self._services))
        except BaseException:
            self._close()
            raise
        self._open = list(self._choices)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_failure = kind is not None and issubclass(kind, Exception)
        for _ in self._open:
            self._services.metrics.count_finished("error" if is_failure else "abort")
        self._close()

    def _close(self) -> None:
        for choice in self._choices:
            if not choice.has_ended:
                self._services.backend.abort(choice.request.request_id)
        self._services.capacity.give_back(len(self.plan.requests))
        self._open = []

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, what became visible of it), as it comes, until every choice has ended. Raises GenerationError."""
        while self._open:
            self._ready.clear()
            has_news = False
            for choice in tuple(self._open):
                output = choice.stream.take()
                if output is not None:
                    has_news = True
                    yield choice.index, self._take(choice, output)
            if not has_news:  # a failure may stand right behind what was taken
                await self._ready.wait()

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object."""
        num_prompt, num_generated = self.plan.num_prompt_tokens, sum(choice.text.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }

    def slo_report(self) -> dict[str, Any] | None:
        """Whether the SLO held, for the slowest choice; None when the client named none."""
        slo = self.plan.slo
        report: dict[str, Any] = {}
        if slo.ttft_s is not None:
            ttft_s = max((choice.ttft_s for choice in self._choices), default=0.0)
            report["ttft"] = _verdict(ttft_s, slo.ttft_s)
        if slo.tpot_s is not None:
            tpot_s = max((choice.tpot_s for choice in self._choices), default=0.0)
            report["tpot"] = _verdict(tpot_s, slo.tpot_s)
        if slo.deadline_s is not None:
            end_to_end_s = max((choice.end_to_end_s for choice in self._choices), default=0.0)
            report["deadline"] = _verdict(end_to_end_s, slo.deadline_s)
        return {"slo": report} if report else None

    def _take(self, choice: "_Choice", output: Output) -> Piece:
        piece = choice.text.take(output)
        choice.measure(len(output.token_ids), time.monotonic())
        if piece.finish_reason is not None:
            self._open.remove(choice)
            choice.end(piece.finish_reason.value)
            choice.has_ended = output.finish_reason is not None
            if not choice.has_ended:  # ended by a stop string: the worker does not know yet
                self._services.backend.abort(choice.request.request_id)
        return piece


class _Choice:
    """One request in the cluster, with its times."""

    def __init__(self, index: int, request: Request, stream: RequestStream, plan: Plan, services: Services) -> None:
        self.index = index
        self.request = request
        self.stream = stream
        self.has_ended = False  # as far as the cluster knows
        self.text = ChoiceText(
            services.tokenizer, request, stops=plan.stops, eos_token_ids=services.model.eos_token_ids
        )
        self._metrics = services.metrics
        self._num_tokens = 0
        self._first_s: float | None = None
        self._last_s = request.arrival_s

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return (self._last_s if self._first_s is None else self._first_s) - self.request.arrival_s

    @property
    def end_to_end_s(self) -> float:
        """Arrival to last token."""
        return self._last_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens; 0 for a single one."""
        if self._first_s is None or self._num_tokens < 2:
            return 0.0
        return (self._last_s - self._first_s) / (self._num_tokens - 1)

    def measure(self, num_new: int, now: float) -> None:
        """Count tokens that came together now."""
        if num_new and self._first_s is None:
            self._first_s = now
            self._metrics.ttft_s.observe(now - self.request.arrival_s)
            self._metrics.prompt_tokens.inc(self.request.prompt_len)
        elif num_new:
            self._metrics.gap_s.observe((now - self._last_s) / num_new)
        self._last_s = now
        self._num_tokens += num_new
        self._metrics.generation_tokens.inc(num_new)

    def end(self, reason: str) -> None:
        """The answer is complete."""
        self._metrics.count_finished(reason)
        self._metrics.e2e_s.observe(self._last_s - self.request.arrival_s)
        if self._num_tokens > 1:
            self._metrics.tpot_s.observe(self.tpot_s)


def _submit(request: Request, services: Services) -> RequestStream:
    """Hand the request to the cluster, unless it asks for nothing but its own prompt."""
    sampling = request.sampling
    if sampling.max_tokens > 0 or (sampling.num_prompt_logprobs is not None and request.prompt_len > 1):
        return services.backend.submit(request)
    stream = RequestStream(request)
    stream.push((), (), FinishReason.LENGTH)
    return stream


def _verdict(measured_s: float, target_s: float) -> dict[str, Any]:
    return {
        "target_ms": round(target_s * 1000.0, 3),
        "measured_ms": round(measured_s * 1000.0, 3),
        "held": measured_s <= target_s,
    }
