"""Lines that the cluster rejects: one that it never takes waits alone, and a cluster that is full is left in peace."""

from pathlib import Path

import pytest

from alignedserve.api.errors import Overloaded, TimedOut
from alignedserve.batches.driver import BatchDriver
from alignedserve.core.request import Request
from tests.gateway.batches.batch_support import batch_gateway, eventually
from tests.gateway.support import saying
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_line, chat_lines

REJECTED = 7  # max_tokens of the line `never`
AN_HOUR = 3600.0


def rejecting(retry_after_s: float) -> Script:
    return Script((), failure=Overloaded("There is no place for this.", retry_after_s=retry_after_s))


def lines_of(*names: str) -> bytes:
    """Return a file of these lines, none of which begins as another does: they begin in their order."""
    lines = [chat_line(name, content=name * 20, max_tokens=REJECTED if name == "never" else 9) for name in names]
    return b"".join(line + b"\n" for line in lines)


async def test_a_line_that_is_never_taken_waits_alone(tmp_path: Path) -> None:
    def script(request: Request) -> Script:
        return rejecting(AN_HOUR) if request.sampling.max_tokens == REJECTED else saying("hello")(request)

    async with batch_gateway(tmp_path, script, max_in_flight=1) as served:
        made = await served.submit(lines_of("first", "never", *"0123456789"))
        await served.wait_for_lines(made["id"], 11)


async def test_the_first_line_of_all_holds_up_no_others_if_it_is_never_taken(tmp_path: Path) -> None:
    """There is one place, and both the line and its model may be asked again at the same time."""

    def script(request: Request) -> Script:
        return rejecting(0.01) if request.sampling.max_tokens == REJECTED else saying("hello")(request)

    async with batch_gateway(tmp_path, script, max_in_flight=1) as served:
        made = await served.submit(lines_of("never", *"0123456789"))
        await served.wait_for_lines(made["id"], 10)


async def test_a_cluster_that_takes_nothing_more_is_not_asked_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns, start_lines = 0, BatchDriver._start_lines

    def counted(driver: BatchDriver) -> None:
        nonlocal num_turns
        num_turns += 1
        start_lines(driver)

    monkeypatch.setattr(BatchDriver, "_start_lines", counted)
    monkeypatch.setattr("alignedserve.batches.driver._START_S", 0.001)
    answers = [saying("hello")] * 2

    def script(request: Request) -> Script:
        return answers.pop()(request) if answers else rejecting(AN_HOUR)

    async with batch_gateway(tmp_path, script, max_in_flight=1) as served:
        await served.submit(chat_lines(50))

        async def is_full() -> bool:
            return len(served.backend.submitted) >= 4

        await eventually(is_full)
        num_turns = 0

        async def was_in_peace() -> bool:
            return num_turns > 50

        await eventually(was_in_peace)
        assert len(served.backend.submitted) == 4  # two were answered, and two rejected after them


async def test_lines_that_found_no_turn_for_hours_have_failed_no_attempt(tmp_path: Path) -> None:
    """Chat may take everything for a day: each line is then silent for as long as a request may be, again and again."""
    num_silent = 0

    def script(request: Request) -> Script:
        nonlocal num_silent
        num_silent += 1
        if num_silent <= 4:
            return Script((), failure=TimedOut("No token came for 3600 s."))
        return saying("hello")(request)

    async with batch_gateway(tmp_path, script, max_in_flight=1, max_attempts=2) as served:
        made = await served.submit(chat_lines(2))
        batch = await served.wait_for(made["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
