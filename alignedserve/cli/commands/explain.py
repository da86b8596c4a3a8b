"""`alignedserve explain`: where the time of a request went, and what it waited for."""

import asyncio

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from alignedserve.api.timelines.timeline import plain_request_id
from alignedserve.cli.console import print_json, printable, results
from alignedserve.client.openai_client import OpenAiClient
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import ConfigError, ProtocolError


class _Reason(msgspec.Struct, frozen=True):
    text: str


class ExplainedObjective(msgspec.Struct, frozen=True):
    """An objective and its outcome."""

    name: str
    target_ms: float
    measured_ms: float | None
    held: bool | None


class _Phase(msgspec.Struct, frozen=True):
    name: str
    where: str
    start_ms: float
    duration_ms: float
    is_wait: bool
    reasons: list[_Reason]


class _Event(msgspec.Struct, frozen=True):
    at_ms: float
    where: str
    text: str
    reason: _Reason | None = None


class ExplainedStanding(msgspec.Struct, frozen=True):
    """Where a choice stands that goes on."""

    text: str
    stage: str | None = None
    position: int | None = None
    start_in_ms: float | None = None
    latest_start_in_ms: float | None = None


class ExplainedChoice(msgspec.Struct, frozen=True):
    """The course of one choice."""

    index: int
    finish_reason: str | None
    output_tokens: int | None
    predicted_tokens: float | None
    cached_prompt_tokens: int
    duration_ms: float | None
    objectives: list[ExplainedObjective]
    phases: list[_Phase]
    events: list[_Event]
    events_left_out: int
    standing: ExplainedStanding | None = None  # None: it has ended, or the server tells of none


class ExplainedRequest(msgspec.Struct, frozen=True):
    """A call and its choices."""

    id: str
    client_request_id: str | None
    model: str
    service_tier: str
    gateway: str
    state: str
    prompt_tokens: int
    trace_id: str | None
    choices: list[ExplainedChoice]
    complete: bool = True  # False: steps may still come


_BAR_WIDTH = 24


def explain(request_id: str, url: str, *, json_output: bool) -> None:
    """Print the course of a request. Raises ConfigError, PeerError."""
    if plain_request_id(request_id) is None:
        raise ConfigError(f"{printable(request_id)[:40]!r} is no id of a request: a response's `id`, or x-request-id")
    document = asyncio.run(_fetch(request_id, url))
    if json_output:
        print_json(msgspec.json.decode(document))
        return
    try:
        request = msgspec.json.decode(document, type=ExplainedRequest)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{url} does not explain requests as this version does") from error
    show(request, results())


async def _fetch(request_id: str, url: str) -> bytes:
    async with OpenAiClient(url=url, api_key=client_api_key()) as client:
        return await client.get(f"/v1/alignedserve/requests/{request_id}")


def show(request: ExplainedRequest, console: Console) -> None:
    lines = [
        f"{request.id}  {request.model}  {request.state}  ({request.gateway})",
        f"{request.prompt_tokens} prompt tokens, service tier {request.service_tier}",
    ]
    if request.client_request_id is not None:
        lines.append(f"the client's own id: {request.client_request_id}")
    if request.trace_id is not None:
        lines.append(f"trace: {request.trace_id}")
    if request.state == "ended" and not request.complete:
        lines.append("It has just ended: its last steps may be missing for a second.")
    _print(console, "\n".join(lines))
    for choice in request.choices:
        is_alone = len(request.choices) == 1
        heading = [] if is_alone else [f"Choice {choice.index}"]
        standing = [] if choice.standing is None else [f"now: {choice.standing.text}"]
        _print(console, "\n".join(["", *heading, _outcome(choice), *standing, *_objectives(choice)]))
        console.print(_phase_table(choice))
        table = Table(_right("after"), "at", "step", "reason", title="Step by step")
        table.title_justify = "left"
        for event in choice.events:
            reason = "" if event.reason is None else event.reason.text
            table.add_row(_time(event.at_ms), *map(_cell, (event.where, event.text, reason)))
        console.print(table)
        if choice.events_left_out:
            _print(console, f"{choice.events_left_out} more steps were not kept.")


def _outcome(choice: ExplainedChoice) -> str:
    predicted = "" if choice.predicted_tokens is None else f" ({choice.predicted_tokens:.0f} predicted)"
    cached = f", {choice.cached_prompt_tokens} prompt tokens from the prefix cache" * bool(choice.cached_prompt_tokens)
    if choice.output_tokens is None:
        return f"running{predicted}{cached}"
    reason = choice.finish_reason or "not finished"
    return f"{choice.output_tokens} tokens{predicted}, {reason}, after {_time(choice.duration_ms)}{cached}"


def _objectives(choice: ExplainedChoice) -> list[str]:
    undecided = "open" if choice.output_tokens is None else "not known"
    return [_objective(objective, undecided) for objective in choice.objectives]


def _objective(objective: ExplainedObjective, undecided: str) -> str:
    verdict = {True: "held", False: "missed", None: undecided}[objective.held]
    was = "" if objective.measured_ms is None else f" with {_time(objective.measured_ms)}"
    return f"objective {objective.name} {_time(objective.target_ms)}: {verdict}{was}"


def _phase_table(choice: ExplainedChoice) -> Table:
    total_ms = max(sum(phase.duration_ms for phase in choice.phases), 1e-9)
    table = Table("phase", "at", _right("from"), _right("for"), "", "why", title="Where its time went")
    table.title_justify = "left"
    for phase in choice.phases:
        name = f"{phase.name} (wait)" if phase.is_wait else phase.name
        cells = (name, phase.where, _time(phase.start_ms), _time(phase.duration_ms), _bar(phase, total_ms))
        table.add_row(*map(_cell, cells), _cell("; ".join(reason.text for reason in phase.reasons)))
    return table


def _right(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


def _bar(phase: _Phase, total_ms: float) -> str:
    return "█" * max(round(_BAR_WIDTH * phase.duration_ms / total_ms), 1)


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.1f} ms" if milliseconds < 10_000.0 else f"{milliseconds / 1e3:.1f} s"


def _cell(text: str) -> Text:
    return Text(printable(text))


def _print(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, soft_wrap=True)
