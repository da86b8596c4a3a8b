"""Workloads built from the language of workloads.

Every class of traffic draws its arrivals, lengths, objectives and predictions from generators of their own, made from
the seed and the class's name: another rate leaves the lengths as they are, and a further class changes no other.
"""

import enum
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count, islice

import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass, Slo
from lab.workload.arrivals import GapDistribution, Renewal
from lab.workload.catalogue import Library
from lab.workload.distributions import DrawnLengths, FloatArray, IntArray, TokenLengths, ValueDistribution, whole
from lab.workload.grammar import MAX_SPAN_S, RECORDED, ClassSpec, ClientLimit, parse_classes
from lab.workload.prompt_texts import after_instruction, conversation
from lab.workload.recordings import Extract, RecordedSource, Recording
from lab.workload.requests import ClosedLoop, TextRun, TimedRequest, Workload, WorkloadDescription
from lab.workload.traces import Terms

DEFAULT_NUM_REQUESTS = 100
_BLOCK = 2048  # requests that are drawn together, whatever part of them is needed


class _Purpose(enum.IntEnum):
    ARRIVALS = 0
    LENGTHS = 1
    OBJECTIVES = 2
    PREDICTIONS = 3
    INSTRUCTIONS = 4
    INSTRUCTION_LENGTHS = 5


def build_workload(
    specification: str,
    *,
    seed: int,
    library: Library,
    num_requests: int | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Return the workload of a specification (grammar.py). Raises ConfigError.

    `num_requests` counts open-loop requests (closed ones where there is no open class), `duration_s` ends both kinds.
    Without either, recordings are played to their end, and everything else has DEFAULT_NUM_REQUESTS.
    """
    if seed < 0 or (num_requests is not None and num_requests < 1) or (duration_s is not None and duration_s <= 0):
        raise ConfigError("a workload needs a seed of at least 0 and a number of requests or a duration above 0")
    specs = parse_classes(specification)
    opened = [spec for spec in specs if not spec.is_closed]
    if num_requests is None and duration_s is None and not (opened and all(map(_is_recorded, opened))):
        num_requests = DEFAULT_NUM_REQUESTS
    classes = [_ClassTraffic(spec, seed, library) for spec in specs]
    loops = tuple(traffic.closed_loop() for traffic in classes if traffic.spec.is_closed)
    arriving = (request for traffic in classes for request in traffic.opened(num_requests, duration_s))
    requests = tuple(islice(sorted(arriving, key=lambda request: request.arrival_s), num_requests))
    latest_s = requests[-1].arrival_s if requests else 0.0
    if latest_s > MAX_SPAN_S:
        raise ConfigError(f"the workload's requests come over {latest_s / 86400:.3g} days, more than a year")
    ends_s = duration_s
    if loops and ends_s is None and opened:
        ends_s = latest_s
    description = WorkloadDescription(specification, seed, {"num_requests": num_requests, "duration_s": duration_s})
    return Workload(description, requests, loops, ends_s, None if opened or not loops else num_requests)


def _is_recorded(spec: ClassSpec) -> bool:
    return spec.arrivals == RECORDED


@contextmanager
def _blamed_on(spec: ClassSpec) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"workload {spec.name}: {error}") from None


class _ClassTraffic:
    def __init__(self, spec: ClassSpec, seed: int, library: Library) -> None:
        self.spec = spec
        self._seed = seed
        self._library = library
        source = None if spec.source is None else library.source(spec.source)
        self._source = source
        self._drawn = DrawnLengths(source, spec.prompt, spec.output)

    def _generator(self, purpose: _Purpose, block: int = 0) -> Generator:
        return np.random.default_rng([self._seed, zlib.crc32(self.spec.name.encode()), purpose, block])

    # --- open loop

    def opened(self, count: int | None, duration_s: float | None) -> Iterable[TimedRequest]:
        if self.spec.is_closed:
            return []
        with _blamed_on(self.spec):
            if _is_recorded(self.spec):
                return self._in_hours(self._recorded_requests(duration_s), duration_s)
            arrival_s = self._arrivals(count, duration_s).tolist()
            firsts = range(0, len(arrival_s), _BLOCK)
            blocks = [self._block(first // _BLOCK, arrival_s[first : first + _BLOCK]) for first in firsts]
            return self._in_hours(list(chain.from_iterable(blocks)), duration_s)

    def _in_hours(self, requests: list[TimedRequest], duration_s: float | None) -> list[TimedRequest]:
        starts = self.spec.starts
        if starts is None:
            return requests
        moved = (replace(request, arrival_s=starts.next_s(request.arrival_s)) for request in requests)
        return [request for request in moved if duration_s is None or request.arrival_s < duration_s]

    def _arrivals(self, count: int | None, duration_s: float | None) -> FloatArray:
        spec, rng = self.spec, self._generator(_Purpose.ARRIVALS)
        assert spec.rate is not None, "checked by the grammar"
        if spec.arrivals in [distribution.value for distribution in GapDistribution]:
            until = math.inf if duration_s is None else spec.rate * duration_s
            return Renewal(spec.cv, GapDistribution(spec.arrivals)).arrivals(rng, count=count, until=until) / spec.rate
        profile = self._library.profile(spec.arrivals)
        until, rate = math.inf, spec.rate
        if duration_s is not None:
            until = rate * duration_s
            rate = profile.rate_of_whole(rate=rate, start_s=spec.start_s, duration_s=duration_s)
        steady = Renewal(spec.cv).arrivals(rng, count=count, until=until)
        return profile.stretch(steady, rate=rate, start_s=spec.start_s)

    def _recorded_requests(self, duration_s: float | None) -> list[TimedRequest]:
        recording = self._recorded(duration_s)
        requests = self._timed(recording.arrival_s.tolist(), recording.lengths)
        is_as_recorded = self.spec.prompt is None  # a prompt of another length has another text
        instructions = chain.from_iterable(map(self._instructions, count()))
        return [
            after_instruction(replace(request, runs=runs if is_as_recorded else ()), instruction)
            for request, runs, instruction in zip(requests, recording.runs, instructions, strict=False)
        ]

    def _recorded(self, duration_s: float | None) -> Recording:
        spec = self.spec
        if not isinstance(self._source, RecordedSource):
            raise ConfigError(f"{spec.source} has no arrival times; give a rate= instead")
        if spec.is_repeated and duration_s is None:
            raise ConfigError("repeat= needs a duration")
        extract = Extract(spec.start_s, duration_s, spec.rate, spec.is_repeated)
        recording = self._source.record(self._generator(_Purpose.ARRIVALS), extract)
        completed = self._drawn.completed(
            recording.lengths, self._generator(_Purpose.LENGTHS), len(recording.arrival_s)
        )
        lengths, rows = spec.limits.cut(completed)
        return replace(recording.take(rows), lengths=lengths)

    # --- closed loop

    def closed_loop(self) -> ClosedLoop:
        size = self.spec.outstanding or self.spec.wave
        assert size is not None, "checked by the grammar"
        is_wave, stream = self.spec.wave is not None, _DrawnStream(self)
        return ClosedLoop(self.spec.name, size, is_wave, stream, starts=self.spec.starts)

    def block(self, number: int) -> list[TimedRequest]:
        with _blamed_on(self.spec):
            return self._block(number, [0.0] * _BLOCK)

    # --- requests

    def _block(self, number: int, arrival_s: Sequence[float]) -> list[TimedRequest]:
        spec, instructions = self.spec, self._instructions(number)
        if spec.turns == 1:
            timed = self._timed(arrival_s, self._lengths(number), number)
            return list(map(after_instruction, timed, instructions))
        pauses = [spec.think_s] * len(arrival_s)
        turns = [
            self._timed(pauses if turn else arrival_s, self._lengths(block), block)
            for turn, block in enumerate(range(number * spec.turns, (number + 1) * spec.turns))
        ]
        return [
            conversation(spoken, f"{spec.name}/{number * _BLOCK + place}", instructions[place])
            for place, spoken in enumerate(zip(*turns, strict=True))
        ]

    def _instructions(self, block: int) -> Sequence[TextRun | None]:
        spec = self.spec
        if spec.instruction is None:
            return [None] * _BLOCK
        lens = whole(spec.instruction.draw(self._generator(_Purpose.INSTRUCTION_LENGTHS), spec.instructions)).tolist()
        texts = [TextRun(f"{spec.name}/instruction {number}", length) for number, length in enumerate(lens)]
        chosen = self._generator(_Purpose.INSTRUCTIONS, block).integers(len(texts), size=_BLOCK)
        return [texts[number] for number in chosen.tolist()]

    def _lengths(self, block: int) -> TokenLengths:
        return self.spec.limits.draw(self._drawn, self._generator(_Purpose.LENGTHS, block), _BLOCK)

    def _timed(self, arrival_s: Sequence[float], lengths: TokenLengths, block: int = 0) -> list[TimedRequest]:
        spec = self.spec
        assert lengths.prompt_len is not None, "lengths are complete"
        output_len = self._answers(lengths)
        limits = _limits(spec, output_len)
        terms: list[Terms | None] = [None] * len(lengths) if lengths.terms is None else lengths.terms.tolist()
        stated = [None if term is None else term.request_class for term in terms]
        classes, slos = _objectives(spec, self._generator(_Purpose.OBJECTIVES, block), stated)
        columns = (lengths.prompt_len.tolist(), output_len.tolist(), limits, classes, slos)
        timed = [
            TimedRequest(
                arrival,
                prompt,
                output,
                limit,
                spec.name,
                request_class,
                slo,
                spec.priority,
                prediction,
                tenant=spec.tenant,
                weight=spec.weight,
                num_encoder_tokens=spec.encoder,
            )
            for arrival, prompt, output, limit, request_class, slo, prediction in zip(
                arrival_s, *columns, self._predicted(output_len, block), strict=False
            )
        ]
        return list(map(_on_terms, timed, terms))

    def _answers(self, lengths: TokenLengths) -> IntArray:
        assert lengths.output_len is not None, "lengths are complete"
        limit = self.spec.max_tokens
        return np.minimum(lengths.output_len, limit) if isinstance(limit, int) else lengths.output_len

    def _predicted(self, output_len: IntArray, block: int) -> list[int] | list[None]:
        prediction = self.spec.prediction
        if prediction is None or not len(output_len):
            return [None] * len(output_len)
        first = output_len if block == 0 else self._answers(self._lengths(0))
        rng = self._generator(_Purpose.PREDICTIONS, block)
        predicted: list[int] = prediction.predict(output_len, mean_len=float(first.mean()), rng=rng).tolist()
        return predicted


class _DrawnStream:
    def __init__(self, traffic: _ClassTraffic) -> None:
        self._traffic = traffic
        self._blocks: dict[int, list[TimedRequest]] = {}

    def __getitem__(self, number: int) -> TimedRequest:
        block, place = divmod(number, _BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._traffic.block(block)
        return self._blocks[block][place]


def _limits(spec: ClassSpec, output_len: IntArray) -> list[int] | list[None]:
    match spec.max_tokens:
        case ClientLimit.CONTEXT:
            return [None] * len(output_len)
        case ClientLimit.POWER_OF_TWO:
            return [1 << (length - 1).bit_length() for length in output_len.tolist()]
        case ClientLimit.EXACT:
            return list(output_len.tolist())
        case limit:
            return [limit] * len(output_len)


def _objectives(
    spec: ClassSpec, rng: Generator, stated: Sequence[RequestClass | None]
) -> tuple[list[RequestClass], list[Slo]]:
    """Return class and objectives of every request. `stated`: the classes that a trace's rows name.

    Where classes are shared out or named, best-effort requests have the deadline only, and others TTFT and TPOT.
    """
    is_best_effort = (rng.random(len(stated)) < spec.be_share).tolist()
    slos = _slos(spec, rng, len(stated))
    classes = [
        own or (RequestClass.BEST_EFFORT if is_be else spec.request_class)
        for own, is_be in zip(stated, is_best_effort, strict=True)
    ]
    return classes, [
        _of_class(request_class, slo) if own or spec.be_share else slo
        for request_class, own, slo in zip(classes, stated, slos, strict=True)
    ]


def _slos(spec: ClassSpec, rng: Generator, count: int) -> list[Slo]:
    distributions = (spec.ttft_s, spec.tpot_s, spec.deadline_s)
    if all(distribution is None or distribution.constant is not None for distribution in distributions):
        return [
            Slo(*(None if distribution is None else distribution.constant for distribution in distributions))
        ] * count

    def drawn(distribution: ValueDistribution | None) -> list[float] | list[None]:
        if distribution is None:
            return [None] * count
        return (
            [distribution.constant] * count
            if distribution.constant is not None
            else distribution.draw(rng, count).tolist()
        )

    return list(map(Slo, *map(drawn, distributions)))


def _of_class(request_class: RequestClass, slo: Slo) -> Slo:
    return Slo(deadline_s=slo.deadline_s) if request_class is RequestClass.BEST_EFFORT else Slo(slo.ttft_s, slo.tpot_s)


def _on_terms(request: TimedRequest, terms: Terms | None) -> TimedRequest:
    if terms is None:
        return request
    priority = request.priority if terms.priority is None else terms.priority
    return replace(request, slo=terms.slo or request.slo, priority=priority)
