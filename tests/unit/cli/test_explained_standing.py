"""What `alignedserve explain` prints of a choice that waits, and of one that has ended."""

import msgspec
from rich.console import Console

from alignedserve.cli.commands.explain import (
    ExplainedChoice,
    ExplainedObjective,
    ExplainedRequest,
    ExplainedStanding,
    show,
)

TEXT = "number 223 in the queue, 12000 prompt tokens before it; it is expected to start in 24.0 s"
WAITING = ExplainedChoice(0, None, None, 30.0, 0, None, [], [], [], 0, standing=ExplainedStanding(TEXT))
CALL = ExplainedRequest("cmpl-1", None, "tiny", "flex", "gateway-0", "running", 12, None, [WAITING])


def shown(call: ExplainedRequest) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        show(call, console)
    return capture.get()


def test_a_choice_that_waits_is_shown_with_its_place_and_when_it_is_likely_to_start() -> None:
    text = shown(CALL)
    assert "tiny  running" in text
    assert f"now: {TEXT}\n" in text


def test_one_that_has_ended_is_said_to_have() -> None:
    ended = msgspec.structs.replace(WAITING, output_tokens=5, finish_reason="stop", duration_ms=80.0, standing=None)
    text = shown(msgspec.structs.replace(CALL, state="ended", choices=[ended]))
    assert "tiny  ended" in text
    assert "now:" not in text


def test_an_objective_is_open_only_while_the_request_goes_on() -> None:
    waiting = msgspec.structs.replace(WAITING, objectives=[ExplainedObjective("tpot", 100.0, None, None)])
    ended = msgspec.structs.replace(waiting, output_tokens=0, duration_ms=80.0, standing=None)
    assert "objective tpot 100.0 ms: open" in shown(msgspec.structs.replace(CALL, choices=[waiting]))
    assert "objective tpot 100.0 ms: not known" in shown(msgspec.structs.replace(CALL, state="ended", choices=[ended]))
