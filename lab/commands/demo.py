"""`alignedserve demo`: two minutes of real traffic on a real cluster, every answer checked."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rich.progress import Progress
from rich.table import Table

from alignedserve.cli.console import FAILURE, INTERRUPTED, notes, printable, progress, results, to_json, write_json
from alignedserve.client.openai_client import CompletionCall, CompletionOutcome, OpenAiClient
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.config.environment import client_api_key
from alignedserve.config.model_settings import load_models
from alignedserve.pocket.tasks import is_correct
from lab.commands.options import DemoOptions
from lab.evaluation.batch_alignment import Alignment, alignment_of
from lab.evaluation.checked_trace import (
    HANDOFFS_REFUSED,
    HANDOFFS_VERIFIED,
    CheckedPlan,
    DemoReport,
    WrongAnswer,
    WrongAnswerCause,
    blocks_used,
    find_problems,
    parse_metrics,
    plan_checked_trace,
)
from lab.evaluation.fault_injector import Fault, FaultInjector, plan_faults
from lab.evaluation.pocket_calls import pocket_tokenizer, task_call
from lab.evaluation.repeated_answers import RepeatedAnswers, compare_answers, most_disturbed
from lab.evaluation.structured_answers import is_valid_answer, structured_call
from lab.loadgen.load_generator import LoadGenerator, LoadRun, SentRequest
from lab.loadgen.load_plan import LoadRequest
from lab.loadgen.prompts import CountTokens
from lab.loadgen.report import print_latencies, remarks
from lab.loadgen.summary import summarise
from lab.workload.traces import shipped_trace

# Requests per second that two cores hold easily under the default configuration (TTFT median 0.2 s). The
# trace itself has 6.26.
DEFAULT_RATE = 2.0
DRAIN_TIMEOUT_S = 20.0
_DRAIN_POLL_S = 0.25
_SETTLE_S = 1.0  # the gateway's numbers are reports of the other processes, a moment old
_SHOWN_WRONG = 5


def demo(options: DemoOptions, template: WorkerTemplate | None = None) -> int:
    """Run the command and return its exit code. `template`: of the processes of a cluster that is started.

    It is 1 when a request was lost, a block leaked or an answer was corrupted, 130 when Ctrl-C ended it early.
    """
    count_tokens = pocket_tokenizer()
    checked = plan_checked_trace(
        shipped_trace(),
        duration_s=options.duration_s,
        rate=options.rate or DEFAULT_RATE,
        seed=options.seed,
        count_tokens=count_tokens,
        is_mixed=options.is_mixed,
        has_structured=options.has_faults,
    )
    # Ray prints to stdout that a process was lost; what is printed there is the report.
    with contextlib.redirect_stdout(sys.stderr), _server(options, template) as (url, is_separate):
        faults = plan_faults(options.duration_s, options.seed, is_separate=is_separate) if options.has_faults else []
        report = asyncio.run(_Demo(checked, count_tokens, url, faults).run())
    if options.json_output:
        write_json(to_json(report), "-")
    else:
        _print_report(report)
    if report.num_unjudged is not None:
        return INTERRUPTED
    return FAILURE if report.problems else 0


@contextlib.contextmanager
def _server(options: DemoOptions, template: WorkerTemplate | None) -> Iterator[tuple[str, bool]]:
    """Return the address of the running server, or of a cluster that lives as long as the context.

    And whether it is known to have workers of one phase each.
    """
    if options.url is not None:
        yield options.url, False
        return
    # Here and not above: it loads Ray, which --url does not need.
    from lab.commands.own_cluster import on_free_port, own_cluster

    overrides = [] if options.batching is None else [f"batching.policy={options.batching}"]
    overrides += options.overrides
    if options.config is None:
        # Beside a server that already has the usual port; an explicit --set comes later and wins.
        overrides[:0] = [on_free_port(), "batches.enabled=false"]
    with own_cluster(load_models(options.config, overrides, ()), template) as cluster:
        yield cluster.url, cluster.config.chosen_topology.is_separate


class _Judgement(NamedTuple):
    wrong: list[WrongAnswer]
    repeated: RepeatedAnswers | None
    busy_page: str  # of metrics, before anything was asked again
    drained: dict[str, float]


class _Demo:
    def __init__(self, checked: CheckedPlan, count_tokens: CountTokens, url: str, faults: list[Fault]) -> None:
        self._faults = faults
        self._has_faults = bool(faults)  # planned
        self._checked = checked
        self._count_tokens = count_tokens
        self._client = OpenAiClient(url=url, api_key=client_api_key())
        self._model = ""

    async def run(self) -> DemoReport:
        async with self._client:
            self._model = await self._client.model_name()
            first_page = await self._metrics_page()
            with progress() as bar:
                run = await self._replay(bar)
                try:
                    judgement = None if run.was_interrupted else await self._judge(run, bar)
                except asyncio.CancelledError:  # Ctrl-C: what was seen until now is not thrown away
                    judgement = None
        return self._report(run, first_page, judgement)

    async def _judge(self, run: LoadRun, bar: Progress) -> _Judgement:
        page = await self._metrics_page()
        wrong = await self._ask_again(self._wrong(run), bar)
        repeated = await self._repeat(most_disturbed(run.sent), bar) if self._faults else None
        return _Judgement(wrong, repeated, page, await self._drained_metrics())

    def _report(self, run: LoadRun, first_page: str, judgement: _Judgement | None) -> DemoReport:
        checked = self._checked
        structured = [
            request for request in run.sent if self._is_structured(request) and request.outcome.failure is None
        ]
        report = DemoReport(
            load=summarise(
                run, checked.plan.classes, num_clamped=(checked.num_clamped_prompts, checked.num_clamped_outputs)
            ),
            num_correct=sum(self._is_correct(sent) for sent in run.sent if not self._is_structured(sent)),
            stretch=checked.stretch,
            num_readings=checked.num_readings,
            num_faults=len(self._faults),
            num_structured=len(structured),
            num_valid=sum(map(self._is_correct, structured)),
        )
        if judgement is None:
            return replace(report, num_unjudged=len(self._wrong(run)))
        before, after = parse_metrics(first_page), judgement.drained
        report = replace(
            report,
            wrong=tuple(judgement.wrong),
            blocks_leaked=blocks_used(after),
            handoffs_verified=_gained(before, after, HANDOFFS_VERIFIED),
            handoffs_refused=_gained(before, after, HANDOFFS_REFUSED),
            repeated=judgement.repeated,
            alignment=alignment_of(before, parse_metrics(judgement.busy_page), (first_page, judgement.busy_page)),
        )
        return replace(report, problems=find_problems(report))

    async def _replay(self, bar: Progress) -> LoadRun:
        tasks = self._checked.tasks
        # Counting tokens takes milliseconds for a long prompt, so not between arrivals.
        calls = [self._call(index) for index in range(len(tasks))]
        task_id = bar.add_task("requests", total=len(tasks), status="")
        num_wrong = 0

        async def send(request: LoadRequest, outcome: CompletionOutcome) -> None:
            await self._client.complete(calls[request.index], outcome)

        def on_done(sent: SentRequest) -> None:
            nonlocal num_wrong
            num_wrong += not self._is_correct(sent)
            bar.update(task_id, advance=1, status=f"{num_wrong} wrong or failed" if num_wrong else "")

        injector = FaultInjector(self._faults, _say)
        hurting = asyncio.create_task(injector.run())
        generator = LoadGenerator(plan=self._checked.plan, send=send, on_done=on_done)
        try:
            return await generator.run()
        except asyncio.CancelledError:  # Ctrl-C
            return generator.interrupted()
        finally:
            hurting.cancel()
            await asyncio.gather(hurting, return_exceptions=True)
            self._faults = injector.done

    def _is_structured(self, sent: SentRequest) -> bool:
        return sent.request.index in self._checked.structured

    def _is_correct(self, sent: SentRequest) -> bool:
        if sent.outcome.failure is not None:
            return False
        if self._is_structured(sent):
            return is_valid_answer(sent.outcome.text)
        return is_correct(self._checked.tasks[sent.request.index], sent.outcome.text)

    def _wrong(self, run: LoadRun) -> list[SentRequest]:
        unstructured = (sent for sent in run.sent if not self._is_structured(sent))
        return [sent for sent in unstructured if sent.outcome.failure is None and not self._is_correct(sent)]

    async def _ask_again(self, wrong: list[SentRequest], bar: Progress) -> list[WrongAnswer]:
        answers = []
        for sent in bar.track(wrong, description="wrong answers again, alone") if wrong else ():
            task = self._checked.tasks[sent.request.index]
            again = await self._client.complete(self._call(sent.request.index), CompletionOutcome())
            alone = None if again.failure is not None else again.text
            answers.append(WrongAnswer(sent.request.index, task, sent.outcome.text, alone))
        return answers

    async def _repeat(self, disturbed: list[SentRequest], bar: Progress) -> RepeatedAnswers:
        pairs = []
        for sent in bar.track(disturbed, description="interrupted answers again, alone"):
            call = self._call(sent.request.index)
            pairs.append((sent.outcome, await self._client.complete(call, CompletionOutcome())))
        return compare_answers(pairs)

    def _call(self, index: int) -> CompletionCall:
        task = self._checked.tasks[index]
        if index in self._checked.structured:
            return structured_call(task.prompt, self._model, seed=index)
        return task_call(task, self._model, self._count_tokens, has_logprobs=self._has_faults)

    async def _metrics_page(self) -> str:
        return (await self._client.get("/metrics")).decode("utf-8", errors="replace")

    async def _metrics(self) -> dict[str, float]:
        return parse_metrics(await self._metrics_page())

    async def _drained_metrics(self) -> dict[str, float]:
        end_s = time.monotonic() + DRAIN_TIMEOUT_S
        await asyncio.sleep(_SETTLE_S)
        metrics = await self._metrics()
        while blocks_used(metrics) and time.monotonic() < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
            metrics = await self._metrics()
        return metrics


def _say(fault: Fault) -> None:
    notes().print(f"{fault.at_s:.0f} s: {fault.victim} is {'killed' if fault.is_killed else 'stopped'}", markup=False)


def _gained(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    return after[name] - before.get(name, 0.0) if name in after else None


def _print_report(report: DemoReport) -> None:
    console = results()
    total = report.load.total
    for answer in report.wrong[:_SHOWN_WRONG]:
        console.print(f"wrong ({answer.cause.value}), request {answer.index}:", markup=False)
        console.print(f"  expected: {printable(answer.task.answer)[:200]}", markup=False)
        console.print(f"  answered: {printable(answer.answered)[:200]}", markup=False)
    table = Table(title="demo: a slice of the Azure conversation trace", title_justify="left", show_header=False)
    table.add_row("requests sent", str(total.num_sent))
    table.add_row("completed", str(total.num_completed))
    for label, count in total.failures.items():
        table.add_row(f"lost: {label}", str(count))
    if report.num_faults:
        table.add_row("processes killed or stopped", str(report.num_faults))
    if report.repeated is not None:
        table.add_row("the same alone, bit for bit", _same_alone(report.repeated))
    if report.num_structured:
        table.add_row("valid under their schema", f"{report.num_valid} of {report.num_structured}")
    table.add_row("correct", str(report.num_correct))
    for row in _judged(report):
        table.add_row(*row)
    table.add_row("throughput", _throughput(report))
    if report.alignment is not None:
        table.add_row("running batches", _batches(report.alignment))
    console.print(table)
    print_latencies(console, total)
    console.print(f"- arrivals as traced, {report.stretch:.2f} times as far apart")
    if report.num_unjudged is None:  # else some were not sent
        num_counting = total.num_sent - report.num_readings
        console.print(f"- {report.num_readings} tasks of reading in the prompt, {num_counting} of counting after it")
    for remark in remarks(report.load):
        console.print(f"- {remark}", markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"FAILED: {problem}", markup=False, style="bold red")
    if report.num_unjudged is not None:
        console.print("interrupted: nothing was asked again, so nothing is judged")
    elif not report.problems:
        console.print("passed: nothing lost, nothing leaked, nothing corrupted", style="bold green")


def _judged(report: DemoReport) -> list[tuple[str, str]]:
    if report.num_unjudged is not None:
        return [("wrong", str(report.num_unjudged))]
    return [
        ("wrong, the model's fault", str(report.count(WrongAnswerCause.MODEL_WRONG))),
        ("corrupted on the way", str(report.count(WrongAnswerCause.CORRUPTED))),
        ("KV handoffs verified / refused", f"{_count(report.handoffs_verified)} / {_count(report.handoffs_refused)}"),
        ("blocks leaked after the drain", _count(report.blocks_leaked)),
    ]


def _same_alone(repeated: RepeatedAnswers) -> str:
    num_same = repeated.num_compared - repeated.num_other_words - repeated.num_other_logprobs
    return (
        f"{num_same} of the {repeated.num_compared} most interrupted (longest pause {repeated.longest_pause_s:.1f} s)"
    )


def _throughput(report: DemoReport) -> str:
    total = report.load.total
    return (
        f"{total.requests_per_s:.2f} requests/s, {total.input_tokens_per_s:.0f} input and "
        f"{total.output_tokens_per_s:.0f} output tokens/s"
    )


def _batches(alignment: Alignment) -> str:
    return (
        f"{alignment.num_iterations} iterations of {alignment.mean_batch_size:.1f} requests; "
        f"longest over mean context: median {alignment.spread_p50:.2f}, p90 {alignment.spread_p90:.2f}; "
        f"in batch switch {alignment.switch_share:.1%}"
    )


def _count(value: float | None) -> str:
    return "not reported" if value is None else f"{value:g}"
