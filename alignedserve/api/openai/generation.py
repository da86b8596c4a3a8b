"""Runs all choices of one request to the API and measures them; choices still open at the end are aborted."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from alignedserve.api.backend.interface import GeneratedTokens, RequestStream
from alignedserve.api.errors import ClientDisconnected, GrammarFailed, Overloaded
from alignedserve.api.metrics.gateway_metrics import ModelMetrics
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.choice_decoder import ChoiceDecoder, ChoiceDelta
from alignedserve.api.openai.request_builder import Arrival, GenerationRequest
from alignedserve.api.timelines.timeline import REQUEST_ID_HEADER, CallFacts, Timeline, plain_request_id
from alignedserve.api.work_lanes import NODE_LEN
from alignedserve.core.request import FinishReason, Request, RequestClass
from alignedserve.messages.request_notes import Cause
from alignedserve.usage.records import BEST_EFFORT, REAL_TIME, UsageCounts, UsageSubject

WrittenT = TypeVar("WrittenT")

# Texts of a call without answers that are open at once: a chat waits behind so many messages, not behind thousands.
_MOST_TEXTS = 64
_CHOICE_LEN = 128  # cost of writing a choice beside its tokens, in characters of reading
_CLASSES = {RequestClass.REAL_TIME: REAL_TIME, RequestClass.BEST_EFFORT: BEST_EFFORT}


class Generation:
    """An async context manager: entering submits every choice, leaving aborts unfinished ones. Of many texts without
    answers only the first are submitted then, and each following one as another ends."""

    def __init__(self, request: GenerationRequest, services: ModelServices) -> None:
        self.request = request
        self.tokenizer = services.tokenizer
        self.has_started = False  # all choices that entering submits were submitted
        self.num_generated_tokens = 0  # of all choices
        self.num_reasoning_tokens = 0  # of all choices' thoughts, and of the marks around them
        self.num_cached_tokens = 0  # of prompts, from the prefix cache: of each those that none of its choices computed
        self._num_prompt_tokens = request.num_prompt_tokens
        self._services = services
        self._ready = asyncio.Event()
        self._reader: Callable[[], None] = self._ready.set
        self._timeline: Timeline | None = None  # None: not submitted yet
        self._choices: list[_Choice] = []
        self._open: list[_Choice] = []

    async def __aenter__(self) -> "Generation":
        try:
            self._services.limiter.acquire(self._request_class, len(self.request.requests))
        except Overloaded:
            self._count_refused()
            raise
        request, services = self.request, self._services
        tier, num_prompt = request.service_tier, request.num_prompt_tokens
        facts = call_facts(request.arrival, request.response_id, tier, num_prompt, services)
        self._timeline = services.timelines.begin(facts, request.requests)
        try:
            await self._submit_more()
        except BaseException as error:
            if isinstance(error, Exception):
                self._count_refused()
            self._end_timeline(error)
            self._close()
            raise
        self.has_started = True
        return self

    async def _submit_more(self) -> None:
        requests = self.request.requests
        most = _MOST_TEXTS if requests[0].sampling.wants_embedding else len(requests)
        for index in range(len(self._choices), len(requests)):
            if len(self._open) >= most:
                return
            if index:
                await asyncio.sleep(0)  # streams continue between choices
            await self._services.name_blocks(requests[index])
            stream = _submit(requests[index], self._services)
            stream.call_when_ready(self._call_reader)
            choice = _Choice(index, requests[index], stream, self.request, self._services)
            self._choices.append(choice)
            self._open.append(choice)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for choice in self._open:
            choice.pace.count_unfinished(error)
        if cause_of(error) is not Cause.CLIENT_GONE:
            self._count_refused(len(self._choices))
        if self.is_complete:
            num_generated = max((choice.decoder.num_tokens for choice in self._choices), default=0)
            self._services.metrics.count_request(self.request.requests, num_generated)
        self._count_usage()
        self._end_timeline(error)
        self._close()

    def _count_refused(self, first: int = 0) -> None:
        for request in self.request.requests[first:]:
            self._services.metrics.count_refused(request)

    def _count_usage(self) -> None:
        num_generated, arrival = self.num_generated_tokens, self.request.arrival
        if arrival.is_line or not (self.is_complete or num_generated):
            return
        subject = UsageSubject(arrival.key.name, self.request.model, _CLASSES[self._request_class])
        num_prompt, num_cached = self.request.num_prompt_tokens, self.num_cached_tokens
        counts = UsageCounts(1, num_prompt, num_cached, num_generated, self.compute_us)
        self._services.usage.add(subject, counts)

    @property
    def _request_class(self) -> RequestClass:
        return self.request.requests[0].request_class

    def _end_timeline(self, error: BaseException | None) -> None:
        if self._timeline is not None:
            now, cause = time.monotonic(), cause_of(error)
            for choice in self._open or self._choices:
                self._timeline.choice_ended(choice.index, now, num_tokens=choice.decoder.num_tokens, cause=cause)
            for index in range(len(self._choices), len(self.request.requests)):
                self._timeline.choice_ended(index, now, num_tokens=0, cause=cause)
            self._services.timelines.end(self._timeline)

    def _close(self) -> None:
        for choice in self._choices:
            if not choice.has_ended:
                self._services.backend.abort(choice.request.request_id)
            choice.stream.call_when_ready(_nobody)
        self._services.limiter.release(self._request_class, len(self.request.requests))
        self._open = []
        # With its reader it would be a cycle, and wait for a collection of garbage: at 50 chats a second a hundred
        # thousand objects gathered so, at which the gateway stopped for up to a second.
        self._reader = _nobody

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """Yield (choice, its new text) as it comes, until every choice has ended. Raises GenerationError."""
        while self._open:
            self._ready.clear()
            for new in self.read_new():
                yield new
            await self._submit_more()
            if self._open:
                await self._ready.wait()

    def read_new(self) -> Iterator[tuple[int, ChoiceDelta]]:
        """Yield (choice, its new text) of what has come since the last call. Raises GenerationError."""
        for choice in tuple(self._open):
            try:
                new = choice.stream.read_new()
            except GrammarFailed as error:
                raise error.named(self.request.grammar_param) from error
            if new is not None:
                yield choice.index, self._decode(choice, new)

    def call_when_ready(self, reader: Callable[[], None]) -> None:
        """Call this, instead of waking `deltas`, in the turn of the loop after `read_new` has something. It must not
        raise."""
        self._reader = partial(self._services.readers.call, reader)

    def _call_reader(self) -> None:
        self._reader()

    @property
    def is_complete(self) -> bool:
        """True once every choice has ended."""
        return not self._open and len(self._choices) == len(self.request.requests)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        num_prompt, num_generated = self._num_prompt_tokens, self.num_generated_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.request.output_format.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage

    @property
    def compute_us(self) -> int:
        """Microseconds of computing for all choices, by the workers' reports so far."""
        return round(sum(choice.stream.compute_s for choice in self._choices) * 1e6)

    @property
    def embeddings(self) -> list[bytes]:
        """Embedding of each choice's prompt, float32, once every choice has ended; empty where not asked for."""
        return [choice.stream.embedding for choice in self._choices]

    async def written(self, write: Callable[[], WrittenT]) -> WrittenT:
        """Return what this writes of the whole answer: beside the loop where that takes long, and never refused."""
        return await self._services.lanes.run(self._written_len, write, is_bounded=False)

    @property
    def _written_len(self) -> int:
        request, sampling = self.request, self.request.requests[0].sampling
        per_token = 1 + _scores_len(sampling.num_logprobs)
        per_prompt_token = _scores_len(sampling.num_prompt_logprobs) + (request.echoes or request.has_token_ids)
        num_prompt = sum(choice.prompt_len for choice in request.requests)
        length = self.num_generated_tokens * per_token + num_prompt * per_prompt_token
        return length + _CHOICE_LEN * len(self._choices) + sum(map(len, self.embeddings))

    def slo_report(self) -> dict[str, Any] | None:
        """Return whether the SLO held, for the slowest choice; None when the client named none."""
        slo = self.request.slo
        report: dict[str, Any] = {}
        if slo.ttft_s is not None:
            ttft_s = max((choice.pace.ttft_s for choice in self._choices), default=0.0)
            report["ttft"] = _verdict(ttft_s, slo.ttft_s)
        if slo.tpot_s is not None:
            tpot_s = max((choice.pace.tpot_s for choice in self._choices), default=0.0)
            report["tpot"] = _verdict(tpot_s, slo.tpot_s)
        if slo.deadline_s is not None:
            end_to_end_s = max((choice.pace.end_to_end_s for choice in self._choices), default=0.0)
            report["deadline"] = _verdict(end_to_end_s, slo.deadline_s)
        return {"slo": report} if report else None

    def _decode(self, choice: "_Choice", new: GeneratedTokens) -> ChoiceDelta:
        decoder = choice.decoder
        num_tokens, num_reasoning_tokens = decoder.num_tokens, decoder.num_reasoning_tokens
        delta = decoder.decode(new)
        self.num_generated_tokens += decoder.num_tokens - num_tokens
        self.num_reasoning_tokens += decoder.num_reasoning_tokens - num_reasoning_tokens
        if choice.num_cached_tokens != choice.stream.num_cached_tokens:
            num_per_prompt = len(self.request.requests) // len(self.request.prompts)
            first = choice.index - choice.index % num_per_prompt
            of_prompt = self._choices[first : first + num_per_prompt]
            num_before = min(sibling.num_cached_tokens for sibling in of_prompt)
            choice.num_cached_tokens = choice.stream.num_cached_tokens
            self.num_cached_tokens += min(sibling.num_cached_tokens for sibling in of_prompt) - num_before
        now = time.monotonic()
        if choice.pace.measure(len(new.token_ids), now, choice.stream.num_cached_tokens) and self._timeline is not None:
            self._timeline.first_token(choice.index, now, choice.stream.num_cached_tokens)
        if delta.finish_reason is not None:
            self._open.remove(choice)
            choice.has_ended = new.finish_reason is not None
            self._finish(choice, delta.finish_reason.value, now)
        return delta

    def _finish(self, choice: "_Choice", reason: str, now: float) -> None:
        choice.pace.count_finished(reason)
        cause = None
        if not choice.has_ended:  # ended by a stop string, which the worker does not know
            cause = Cause.STOP_STRING
            self._services.backend.abort(choice.request.request_id)
        if self._timeline is not None:
            num_tokens = choice.decoder.num_tokens
            self._timeline.choice_ended(choice.index, now, num_tokens=num_tokens, finish_reason=reason, cause=cause)


class Pace:
    """Times one choice's tokens, for metrics."""

    def __init__(self, request: Request, metrics: ModelMetrics) -> None:
        self.request = request
        self.num_tokens = 0
        self.first_s: float | None = None
        self.last_s = request.arrival_s
        self._metrics = metrics

    @property
    def ttft_s(self) -> float:
        return (self.last_s if self.first_s is None else self.first_s) - self.request.arrival_s

    @property
    def end_to_end_s(self) -> float:
        return self.last_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        if self.first_s is None or self.num_tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def begin(self, now: float, num_cached_tokens: int) -> None:
        """Note the first token."""
        self.first_s = now
        self._metrics.observe_first_token(self.request, now - self.request.arrival_s)
        self._metrics.count_prompt(self.request, num_cached_tokens)

    def measure(self, num_new: int, now: float, num_cached_tokens: int) -> bool:
        """Note tokens; return whether they are the first."""
        is_first = bool(num_new) and self.first_s is None
        if is_first:
            self.begin(now, num_cached_tokens)
        elif num_new:
            self._metrics.tbt_s.observe((now - self.last_s) / num_new)
        self.last_s = now
        self.num_tokens += num_new
        self._metrics.tbt_s.num_tokens += num_new
        return is_first

    def count_finished(self, reason: str) -> None:
        metrics = self._metrics
        metrics.count_finished(reason)
        metrics.e2e_s.observe(self.end_to_end_s)
        metrics.num_generated.observe(self.num_tokens)
        metrics.decode_s.observe(self.end_to_end_s - self.ttft_s)
        if self.num_tokens > 1:
            metrics.observe_gaps(self.request, self.tpot_s)
        metrics.count_objectives(self.request, self.ttft_s, self.tpot_s, self.end_to_end_s)

    def count_unfinished(self, error: BaseException | None) -> None:
        if cause_of(error) is not Cause.CLIENT_GONE:
            self._metrics.count_refused(self.request)
            return
        does_not_read = isinstance(error, ClientDisconnected)  # since when it has waited for nothing
        now, arrival_s = self.last_s if does_not_read else time.monotonic(), self.request.arrival_s
        gap_s = 0.0 if self.first_s is None else (now - self.first_s) / max(self.num_tokens, 1)
        ttft_s = None if self.first_s is None else self.first_s - arrival_s
        self._metrics.count_left(self.request, ttft_s, gap_s, now - arrival_s)


class _Choice:
    def __init__(
        self, index: int, request: Request, stream: RequestStream, of: GenerationRequest, services: ModelServices
    ) -> None:
        self.index = index
        self.request = request
        self.stream = stream
        self.has_ended = False  # for the cluster
        self.num_cached_tokens = 0  # of its prompt, counted by the generation
        self.pace = Pace(request, services.metrics)
        self.decoder = ChoiceDecoder(
            services.tokenizer,
            request,
            stops=of.stop_strings,
            eos_token_ids=services.model.eos_token_ids,
            output_format=of.output_format,
            options=of.text_options,
        )


def _scores_len(num_top: int | None) -> int:
    return 0 if num_top is None else NODE_LEN * (1 + num_top)


def _nobody() -> None:
    """Read nothing: the generation has ended."""


def _submit(request: Request, services: ModelServices) -> RequestStream:
    sampling = request.sampling
    is_about_prompt = sampling.wants_embedding or (sampling.num_prompt_logprobs is not None and request.prompt_len > 1)
    if sampling.max_tokens > 0 or is_about_prompt:
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


def call_facts(
    arrival: Arrival, response_id: str, service_tier: str, num_prompt_tokens: int, services: ModelServices
) -> CallFacts:
    return CallFacts(
        response_id=response_id,
        http_id=arrival.request_id,
        client_id=plain_request_id(arrival.headers.get(REQUEST_ID_HEADER)),
        owner=arrival.tenant,
        model=services.model.name,
        service_tier=service_tier,
        num_prompt_tokens=num_prompt_tokens,
        received_s=arrival.arrival_s,
        received_unix_s=time.time() - (time.monotonic() - arrival.arrival_s),
        trace=services.timelines.trace_of(arrival.headers),
    )


def cause_of(error: BaseException | None) -> Cause:
    if isinstance(error, Overloaded):
        return Cause.REJECTED
    is_failure = isinstance(error, Exception) and not isinstance(error, ClientDisconnected)
    return Cause.FAILED if is_failure else Cause.CLIENT_GONE
