"""Numbers of a report, computed from a run. Pure; the formulas themselves stand in core/metrics.py."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.client.openai_client import ClientFailure
from alignedserve.core import metrics
from alignedserve.core.metrics import Deadlines, Distribution
from alignedserve.core.request import Slo
from lab.loadgen.load_generator import LoadRun, SentRequest
from lab.loadgen.load_plan import TrafficClass

ALL = "all"  # every class together
_MOST_REASONS = 10
# A generator later than both of these at its 99th percentile shows in what it measures.
GENERATOR_LIMIT_S = 0.02
GENERATOR_LIMIT_OF_TTFT = 0.1  # of the median time to first token


@dataclass(frozen=True, slots=True)
class ClassReport:
    """Numbers of one class of traffic, or of all together."""

    name: str
    slo: Slo
    num_sent: int
    num_completed: int
    duration_s: float  # of the rates below: of a closed loop that was cut off until then, else until the last answer
    failures: dict[str, int]  # by kind, most frequent first
    input_tokens: int  # of completed requests: the server's count, else as planned
    cached_tokens: int  # of `input_tokens`, from the server's prefix cache, as it tells
    output_tokens: int  # of all requests, failed ones and those that were cut off too: they were received
    requests_per_s: float  # completed
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Distribution | None
    tbt_s: Distribution | None  # every gap of every completed request
    tpot_s: Distribution | None
    end_to_end_s: Distribution | None
    slo_attainment: float | None  # None: no objectives
    goodput_per_s: float | None
    fluidity: float | None = None  # share of the tokens' deadlines met, time carried over (Etalon); None: no objectives
    completed_of_arrived: float | None = None  # while requests were sent, the first fifth left out
    stalled: float | None = None  # share of the answers that began with a gap longer than metrics.READABLE_GAP_S
    failure_reasons: dict[str, int] = field(default_factory=dict)  # what servers said of one of each kind


@dataclass(frozen=True, slots=True)
class GeneratorReport:
    """Punctuality of the generator itself."""

    lateness_s: Distribution | None  # of open-loop requests: sent after their planned moment
    loop_lag_s: Distribution | None  # wake-ups of its event loop
    cpu_share: float  # of one core
    was_limit: bool


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The whole report."""

    duration_s: float  # without the time of warming up
    total: ClassReport
    classes: tuple[ClassReport, ...]
    generator: GeneratorReport
    num_server_counts: int  # completed requests whose tokens the server counted itself
    num_clamped_prompts: int = 0
    num_clamped_outputs: int = 0
    prompt_ratio: float | None = None  # prompt tokens by the server's count, by those planned; None: it counted none
    num_interrupted: int | None = None  # requests in the air when Ctrl-C ended the run; None: it came to its end


def summarise(run: LoadRun, classes: Sequence[TrafficClass], *, num_clamped: tuple[int, int] = (0, 0)) -> LoadReport:
    """Return the report of a run; `num_clamped` prompts and outputs were shortened by the plan."""
    slos = {traffic.name: traffic.slo for traffic in classes}
    reports = tuple(_class_report(traffic.name, run, slos, run.duration_of(traffic)) for traffic in classes)
    total = _class_report(None, run, slos, run.duration_s)
    return LoadReport(
        duration_s=run.duration_s,
        total=total,
        classes=reports,
        generator=_generator_report(run, total.ttft_s),
        num_server_counts=sum(
            sent.outcome.failure is None and sent.outcome.num_output_tokens is not None for sent in run.counted
        ),
        num_clamped_prompts=num_clamped[0],
        num_clamped_outputs=num_clamped[1],
        prompt_ratio=_prompt_ratio(run),
        num_interrupted=len(run.cut_off) if run.was_interrupted else None,
    )


def _class_report(name: str | None, run: LoadRun, slos: dict[str, Slo], duration_s: float) -> ClassReport:
    members = [sent for sent in run.counted if name is None or sent.request.class_name == name]
    completed = [sent for sent in members if sent.outcome.failure is None]
    failed = [sent.outcome.failure for sent in members if sent.outcome.failure is not None]
    failures = Counter(failure.label for failure in failed)
    input_tokens = sum(_prompt_tokens(sent) for sent in completed)
    output_tokens = run.num_tokens_of(name)
    has_slo = any(slos[sent.request.class_name] != Slo() for sent in members)
    num_met = sum(_held_slo(sent, slos[sent.request.class_name]) for sent in completed)
    deadlines = [_deadlines(sent, slos[sent.request.class_name]) for sent in members]
    return ClassReport(
        name=name or ALL,
        slo=Slo() if name is None else slos[name],
        num_sent=len(members),
        num_completed=len(completed),
        duration_s=duration_s,
        failures=dict(failures.most_common()),
        input_tokens=input_tokens,
        cached_tokens=sum(sent.outcome.num_cached_tokens for sent in completed),
        output_tokens=output_tokens,
        requests_per_s=metrics.per_second(len(completed), duration_s),
        input_tokens_per_s=metrics.per_second(input_tokens, duration_s),
        output_tokens_per_s=metrics.per_second(output_tokens, duration_s),
        ttft_s=metrics.describe([ttft for sent in completed if (ttft := _ttft_s(sent)) is not None]),
        tbt_s=metrics.describe([gap for sent in completed for gap in metrics.tbt_s(sent.outcome.token_times_s)]),
        tpot_s=metrics.describe([tpot for sent in completed if (tpot := _tpot_s(sent)) is not None]),
        end_to_end_s=metrics.describe([_end_to_end_s(sent) for sent in completed]),
        slo_attainment=metrics.attainment(num_met, len(members)) if has_slo else None,
        goodput_per_s=metrics.per_second(num_met, duration_s) if has_slo else None,
        fluidity=metrics.attainment(
            sum(deadline.num_met for deadline in deadlines), sum(deadline.num_due for deadline in deadlines)
        ),
        completed_of_arrived=_completed_of_arrived(name, run),
        stalled=metrics.stalled([_longest_gap_s(sent) for sent in members if sent.outcome.token_times_s]),
        failure_reasons=_failure_reasons(failed),
    )


def _failure_reasons(failed: Sequence[ClientFailure]) -> dict[str, int]:
    first: dict[str, str] = {}
    for failure in failed:
        first.setdefault(failure.pattern, failure.reason)
    counted = Counter(failure.pattern for failure in failed).most_common(_MOST_REASONS)
    return {first[pattern]: count for pattern, count in counted}


def _prompt_ratio(run: LoadRun) -> float | None:
    counted = [sent for sent in run.counted if sent.outcome.num_prompt_tokens is not None]
    num_planned = sum(sent.request.prompt_len for sent in counted)
    return sum(_prompt_tokens(sent) for sent in counted) / num_planned if num_planned else None


def _prompt_tokens(sent: SentRequest) -> int:
    counted = sent.outcome.num_prompt_tokens
    return sent.request.prompt_len if counted is None else counted


def _ttft_s(sent: SentRequest) -> float | None:
    # From the moment of sending: the generator's own lateness is reported beside it and not blamed on the server.
    return metrics.ttft_s(sent.outcome.sent_s, sent.outcome.token_times_s)


def _tpot_s(sent: SentRequest) -> float | None:
    return metrics.tpot_s(sent.outcome.token_times_s, sent.outcome.num_tokens)


def _longest_gap_s(sent: SentRequest) -> float:
    outcome = sent.outcome
    times_s = outcome.token_times_s if outcome.failure is None else [*outcome.token_times_s, outcome.ended_s]
    return max(metrics.tbt_s(times_s), default=0.0)


def _end_to_end_s(sent: SentRequest) -> float:
    return sent.outcome.ended_s - sent.outcome.sent_s


def _held_slo(sent: SentRequest, slo: Slo) -> bool:
    return metrics.meets_slo(slo, ttft=_ttft_s(sent), tpot=_tpot_s(sent), end_to_end=_end_to_end_s(sent))


def _completed_of_arrived(name: str | None, run: LoadRun) -> float | None:
    members = [sent for sent in run.sent if name is None or sent.request.class_name == name]
    return metrics.completed_of_arrived(
        [sent.outcome.sent_s for sent in members],
        [sent.outcome.ended_s for sent in members if sent.outcome.failure is None],
    )


def _deadlines(sent: SentRequest, slo: Slo) -> Deadlines:
    outcome = sent.outcome
    num_gaps = len(outcome.token_times_s) - 1
    return metrics.token_deadlines(
        slo,
        outcome.sent_s,
        outcome.token_times_s,
        ended_s=None if outcome.failure is None else outcome.ended_s,
        pace=max((outcome.num_tokens - 1) / num_gaps, 1.0) if num_gaps > 0 else 1.0,
    )


def _generator_report(run: LoadRun, ttft: Distribution | None) -> GeneratorReport:
    lateness = metrics.describe([sent.lateness_s for sent in run.counted])
    lag = metrics.describe(run.loop_lags_s)
    worst = max((delays.p99 for delays in (lateness, lag) if delays is not None), default=0.0)
    tolerated = max(GENERATOR_LIMIT_S, GENERATOR_LIMIT_OF_TTFT * (ttft.p50 if ttft is not None else 0.0))
    return GeneratorReport(
        lateness_s=lateness,
        loop_lag_s=lag,
        cpu_share=metrics.per_second(run.cpu_s, run.duration_s),
        was_limit=worst > tolerated,
    )
