"""`alignedserve eval`: is what comes out of the running system right?"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from alignedserve.cli.console import FAILURE, INTERRUPTED, printable, progress, results, to_json, write_json
from alignedserve.client.openai_client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from alignedserve.config.environment import client_api_key
from alignedserve.core.metrics import in_percent
from alignedserve.pocket.tasks import PocketTask
from lab.commands.options import EvalOptions
from lab.evaluation.accuracy import EvalAnswer, EvalItem, EvalReport, GroupScore, make_items, score
from lab.evaluation.pocket_calls import pocket_tokenizer, task_call
from lab.evaluation.questions import Question, make_questions
from lab.loadgen.prompts import CountTokens

POCKET = "pocket"
_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Suite:
    """Items to ask, and the call of one for the model of a name."""

    items: list[EvalItem]
    call: Callable[[EvalItem, str], CompletionCall]


def make_suite(name: str, num_per_group: int, seed: int) -> Suite:
    """Return the pocket model's tasks, or for any other name the questions."""
    if name == POCKET:
        return _pocket(num_per_group, seed, pocket_tokenizer())
    items = [EvalItem(question.group, question) for question in make_questions(num_per_group)]
    return Suite(items, lambda item, model: _question_call(item.task, model))


def _pocket(num_per_group: int, seed: int, count_tokens: CountTokens) -> Suite:
    items = make_items(num_per_group, seed, count_tokens)
    return Suite(items, lambda item, model: task_call(item.task, model, count_tokens))


def _question_call(question: PocketTask | Question, model: str) -> CompletionCall:
    messages = [{"role": "user", "content": question.prompt}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": _ANSWER_TOKENS}
    return CompletionCall(CompletionApi.CHAT, body)


_SHOWN_CHARACTERS = 300


def evaluate(options: EvalOptions) -> int:
    """Return the exit code: 1 when a skill is below the threshold, 130 when Ctrl-C ended it early."""
    suite = make_suite(options.suite, options.num_per_skill, options.seed)
    answers, was_interrupted = asyncio.run(_ask_all(options, suite))
    report = score(answers)
    if options.json_output:
        write_json(_as_json(report, options, was_interrupted=was_interrupted), "-")
    else:
        ended = f"interrupted: {len(answers)} of {len(suite.items)} tasks were answered"
        _print_report(report, options, ended if was_interrupted else _verdict(report, options))
    if was_interrupted:
        return INTERRUPTED
    return FAILURE if report.below(options.least_share) else 0


async def _ask_all(options: EvalOptions, suite: Suite) -> tuple[list[EvalAnswer], bool]:
    items = suite.items
    answers: list[EvalAnswer | None] = [None] * len(items)
    waiting = iter(enumerate(items))
    was_interrupted = False
    client = OpenAiClient(url=options.url, api_key=client_api_key())
    async with client:
        model = await client.model_name()
        with progress() as bar:
            task_id = bar.add_task("tasks", total=len(items), status="")

            async def ask_in_turn() -> None:
                for index, item in waiting:
                    outcome = await client.complete(suite.call(item, model), CompletionOutcome())
                    failure = None if outcome.failure is None else f"{outcome.failure.label}: {outcome.failure.message}"
                    answers[index] = EvalAnswer(item, outcome.text, failure)
                    bar.advance(task_id)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(options.concurrency, len(items))):
                        group.create_task(ask_in_turn())
            except asyncio.CancelledError:  # Ctrl-C: what was answered is not thrown away
                was_interrupted = True
    return [answer for answer in answers if answer is not None], was_interrupted


def _print_report(report: EvalReport, options: EvalOptions, verdict: str) -> None:
    console = results()
    for answer in report.wrong[: options.show_failures]:
        task = answer.item.task
        console.print(f"\n{answer.item.group}: {_shortened(task.prompt)}", markup=False)
        console.print(f"  expected: {_shortened(task.answer)}", markup=False)
        console.print(f"  answered: {_shortened(answer.failure or answer.text)}", markup=False)
    table = Table(title="right answers", title_justify="left", header_style="bold")
    for heading in ("", "tasks", "correct", "failed", "accuracy", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for group in report.skills:
        table.add_row(
            *_row(group), "" if group.accuracy >= options.least_share else f"below {in_percent(options.least_share, 0)}"
        )
    table.add_section()
    for group in report.contexts:
        table.add_row(*_row(group), "")
    console.print(table)
    console.print(verdict, markup=False)


def _verdict(report: EvalReport, options: EvalOptions) -> str:
    below = report.below(options.least_share)
    verdict = "every skill reaches" if not below else f"{', '.join(group.name for group in below)}: below"
    return f"{verdict} {in_percent(options.least_share, 0)}"


def _row(group: GroupScore) -> tuple[str, ...]:
    return (group.name, str(group.num_tasks), str(group.num_correct), str(group.num_failed), in_percent(group.accuracy))


def _shortened(text: str) -> str:
    text = printable(text).replace("\n", " / ")
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


def _as_json(report: EvalReport, options: EvalOptions, *, was_interrupted: bool) -> bytes:
    def scores(groups: tuple[GroupScore, ...]) -> list[dict[str, object]]:
        return [
            {
                "name": group.name,
                "tasks": group.num_tasks,
                "correct": group.num_correct,
                "failed": group.num_failed,
                "accuracy": group.accuracy,
            }
            for group in groups
        ]

    shown = [
        {
            "group": answer.item.group,
            "prompt": answer.item.task.prompt,
            "expected": answer.item.task.answer,
            "answered": answer.text,
            "failure": answer.failure,
        }
        for answer in report.wrong[: options.show_failures]
    ]
    below = [group.name for group in report.below(options.least_share)]
    return to_json(
        {
            "suite": options.suite,
            "seed": options.seed,
            "threshold": options.least_share,
            "skills": scores(report.skills),
            "contexts": scores(report.contexts),
            "below_threshold": below,
            "interrupted": was_interrupted,
            "wrong": shown,
        }
    )
