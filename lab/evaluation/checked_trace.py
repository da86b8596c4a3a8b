"""The demo's workload and its verdict: a real trace in which every request has one right answer. Pure.

Two kinds of tasks. Reading (look a key up, copy a line) shows whether the cache of the whole prompt arrived
intact, but its answer is short; counting after a text has an answer of any length, but hardly looks at the text. Of the
requests with a traced answer longer than LONGEST_READING, every third is a reading task all the same.
"""

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.pocket.tasks import MAX_COUNTED_NUMBERS, PocketTask, make_long_task
from lab.evaluation.batch_alignment import Alignment
from lab.evaluation.pocket_calls import CONTEXT_LEN, MAX_PROMPT_LEN, MIN_PROMPT_LEN, SPARE_LEN, TEMPLATE_LEN
from lab.evaluation.repeated_answers import RepeatedAnswers
from lab.evaluation.structured_answers import MAX_STRUCTURED_PROMPT_LEN, STRUCTURED_EVERY
from lab.loadgen.load_plan import LoadPlan, LoadRequest, TrafficClass
from lab.loadgen.prompts import CountTokens
from lab.loadgen.summary import LoadReport
from lab.workload.traces import TraceRow, mean_rate, repeated, sped_up

CLASS_NAME = "demo"
LONGEST_READING = 20  # traced output tokens up to which a reading task comes near
READING_EVERY = 3
BLOCKS_USED = ("alignedserve_pool_blocks_used", "alignedserve_worker_blocks_used")
HANDOFFS_VERIFIED = "alignedserve_handoffs_verified_total"
HANDOFFS_REFUSED = "alignedserve_handoffs_refused_total"


# The paper's synthetic mixture (AlignedServe, sections 4.1 and 4.2), at a quarter of its lengths: short prompts of less
# than 1 000 tokens, long ones of 1 000 to 8 000; here one in ten is long.
SHORT_LENS, LONG_LENS = (MIN_PROMPT_LEN, 250), (250, MAX_PROMPT_LEN)
LONG_EVERY = 10


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """Plan of a load, the task behind every request (by its index), and its differences from the trace."""

    plan: LoadPlan
    tasks: tuple[PocketTask, ...]
    stretch: float  # arrival gaps are this many times as long as traced
    num_clamped_prompts: int
    num_clamped_outputs: int  # among the counting tasks
    num_readings: int
    structured: frozenset[int] = frozenset()  # requests whose answers are held to a schema instead of the task's


def plan_checked_trace(
    rows: Sequence[TraceRow],
    *,
    duration_s: float,
    rate: float,
    seed: int,
    count_tokens: CountTokens,
    is_mixed: bool = False,
    has_structured: bool = False,
) -> CheckedPlan:
    """Return the beginning of the trace, stretched to `rate` requests per second, as far as `duration_s` goes.

    `is_mixed`: its prompts are replaced by many short and some long ones, its arrivals and answers stay.
    `has_structured`: the answers of some are held to a schema, and checked against that.
    """
    factor = rate / mean_rate(rows)
    chosen = sped_up(repeated(rows, duration_s * factor), factor)
    if is_mixed:
        chosen = list(_mixed(chosen, random.Random(f"{seed}/mixture")))  # noqa: S311
    rng = random.Random(f"{seed}/demo")  # noqa: S311 - a workload, not a secret
    tasks, requests, num_readings, num_clamped_outputs = [], [], 0, 0
    for index, row in enumerate(chosen):
        prompt_len = min(max(row.prompt_len, MIN_PROMPT_LEN), MAX_PROMPT_LEN)
        output_len = _counted_len(row, prompt_len, index)
        num_readings += output_len is None
        num_clamped_outputs += output_len is not None and output_len < row.output_len
        task = make_long_task(rng, prompt_len, count_tokens, output_len)
        tasks.append(task)
        requests.append(LoadRequest(index, CLASS_NAME, row.arrival_s, prompt_len, count_tokens(task.answer)))
    return CheckedPlan(
        plan=LoadPlan((TrafficClass(CLASS_NAME),), tuple(requests)),
        tasks=tuple(tasks),
        stretch=1.0 / factor,
        num_clamped_prompts=sum(not MIN_PROMPT_LEN <= row.prompt_len <= MAX_PROMPT_LEN for row in chosen),
        num_clamped_outputs=num_clamped_outputs,
        num_readings=num_readings,
        structured=frozenset(request.index for request in requests if _may_be_structured(request))
        if has_structured
        else frozenset(),
    )


def _mixed(rows: Sequence[TraceRow], rng: random.Random) -> Iterator[TraceRow]:
    for row in rows:
        lens = LONG_LENS if rng.randrange(LONG_EVERY) == 0 else SHORT_LENS
        yield replace(row, prompt_len=rng.randint(*lens))


def _may_be_structured(request: LoadRequest) -> bool:
    return request.index % STRUCTURED_EVERY == 1 and request.prompt_len + SPARE_LEN <= MAX_STRUCTURED_PROMPT_LEN


def _counted_len(row: TraceRow, prompt_len: int, index: int) -> int | None:
    if row.output_len <= LONGEST_READING or index % READING_EVERY == 0:
        return None
    longest_prompt = prompt_len + prompt_len // 20  # tasks hold the wanted length within 5 %
    num_left = CONTEXT_LEN - TEMPLATE_LEN - SPARE_LEN - longest_prompt
    return max(2, min(row.output_len, MAX_COUNTED_NUMBERS, num_left))


# --- the verdict -----------------------------------------------------------------------------------------------------


class WrongAnswerCause(enum.Enum):
    """Cause of a wrong answer."""

    MODEL_WRONG = "model"  # the same prompt, alone on the idle system, gives the same wrong answer
    CORRUPTED = "corrupted"  # it gives another answer: this one was spoilt on its way


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """A wrong answer, and what a second run of its prompt alone gave (None: that run failed)."""

    index: int
    task: PocketTask
    answered: str
    answered_alone: str | None

    @property
    def cause(self) -> WrongAnswerCause:
        """Return the cause, decided by the second run; a failed second run clears neither side."""
        return WrongAnswerCause.MODEL_WRONG if self.answered == self.answered_alone else WrongAnswerCause.CORRUPTED


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of a demo."""

    load: LoadReport
    num_correct: int
    stretch: float
    num_readings: int
    wrong: tuple[WrongAnswer, ...] = ()
    blocks_leaked: float | None = None  # None: the server does not say
    handoffs_verified: float | None = None
    handoffs_refused: float | None = None
    alignment: Alignment | None = None  # None: the server does not say
    num_faults: int = 0  # processes that were killed or stopped meanwhile
    repeated: RepeatedAnswers | None = None  # None: without faults nothing is asked again but wrong answers
    num_structured: int = 0  # complete answers that were held to a schema
    num_valid: int = 0  # of these
    num_unjudged: int | None = None  # wrong answers, where Ctrl-C came before they were asked again; None: it did not
    problems: tuple[str, ...] = field(default=(), kw_only=True)

    def count(self, cause: WrongAnswerCause) -> int:
        """Return the wrong answers of one kind."""
        return sum(answer.cause is cause for answer in self.wrong)


def find_problems(report: DemoReport) -> tuple[str, ...]:
    """Return what makes the demo fail; empty when all is well.

    A model that is wrong by itself is no fault of the serving.
    """
    problems = []
    num_lost = report.load.total.num_sent - report.load.total.num_completed
    if report.load.total.num_sent == 0:
        problems.append("no request was sent")
    if num_lost:
        problems.append(f"{num_lost} requests were lost")
    if corrupted := report.count(WrongAnswerCause.CORRUPTED):
        problems.append(f"{corrupted} answers were corrupted")
    if num_invalid := report.num_structured - report.num_valid:
        problems.append(f"{num_invalid} answers were not valid under their schema")
    if report.repeated is not None and report.repeated.num_other_words:
        problems.append(f"{report.repeated.num_other_words} answers had other words than alone")
    if report.repeated is not None and report.repeated.num_other_logprobs:
        problems.append(f"{report.repeated.num_other_logprobs} answers had other log-probabilities than alone")
    if report.blocks_leaked is None:
        problems.append(f"the server's /metrics lacks {' or '.join(BLOCKS_USED)}")
    elif report.blocks_leaked:
        problems.append(f"{report.blocks_leaked:g} blocks leaked")
    return tuple(problems)


# --- the metrics page ------------------------------------------------------------------------------------------------


def parse_metrics(page: str) -> dict[str, float]:
    """Return the sum of every metric over its labels, from Prometheus' text format.

    Lines that are no samples are skipped.
    """
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        # A label's value may hold spaces: the sample's value stands after the closing brace.
        name, brace, rest = line.partition("{")
        if brace:
            value = rest.rpartition("}")[2]
        else:
            name, _, value = line.partition(" ")
        try:
            sums[name] = sums.get(name, 0.0) + float(value.split()[0])
        except (ValueError, IndexError):
            continue
    return sums


def blocks_used(metrics: Mapping[str, float]) -> float | None:
    """Return blocks held anywhere in the cluster; None when the page does not say."""
    if any(name not in metrics for name in BLOCKS_USED):
        return None
    return sum(metrics[name] for name in BLOCKS_USED)
