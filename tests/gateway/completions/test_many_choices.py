"""Streams of many choices: what their tokens cost grows as the choices do, not as their square."""

import asyncio
import sys
from typing import Any

from alignedserve.api.models.model_services import NextTurn
from alignedserve.core.request import Request
from tests.gateway.support import chunks_of, gateway
from tests.harnesses.scripted_backend import Script

NUM_TOKENS = 8


async def num_calls(num_choices: int, **fields: Any) -> int:
    """Return how many functions of Python were called for a stream of as many choices."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    async with gateway(lambda _: Script((70,) * NUM_TOKENS)) as served:
        sys.setprofile(note)
        try:
            answer = await served.complete(prompt=["hi"] * num_choices, max_tokens=NUM_TOKENS, stream=True, **fields)
        finally:
            sys.setprofile(None)
    usages = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(answer) if chunk.get("usage")]
    assert usages == sorted(usages)
    assert usages[-1:] == ([NUM_TOKENS * num_choices] if usages else [])
    return count


async def test_a_stream_of_which_many_choices_have_tokens_looks_once_in_a_turn() -> None:
    readers, looks = NextTurn(), list[str]()
    one, other = (lambda: looks.append("one")), (lambda: looks.append("other"))
    for reader in (one, other, one, one):
        readers.call(reader)
    await asyncio.sleep(0)
    assert looks == ["one", "other"]
    readers.call(one)
    await asyncio.sleep(0)
    assert looks == ["one", "other", "one"]


async def test_a_stream_that_cannot_be_written_leaves_no_other_waiting() -> None:
    readers, looks, failures = NextTurn(), list[str](), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def breaks() -> None:
        raise RuntimeError("the connection is closed")

    for reader in (lambda: looks.append("one"), breaks, lambda: looks.append("other")):
        readers.call(reader)
    for _ in range(2):
        await asyncio.sleep(0)
    assert looks == ["one", "other"]
    assert len(failures) == 1


async def test_others_have_their_turns_while_many_choices_are_submitted() -> None:
    num_turns, seen = 0, list[int]()

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    def script(_: Request) -> Script:
        seen.append(num_turns)
        return Script((70,))

    async with gateway(script) as served:
        other = asyncio.create_task(take_turns())
        assert (await served.complete(prompt=["hi"] * 20, max_tokens=1)).status_code == 200
        other.cancel()
    assert len(set(seen)) == 20


async def test_the_usage_so_far_costs_as_much_with_many_choices_as_with_few() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    few, many = [await num_calls(num_choices, stream_options=options) for num_choices in (20, 80)]
    assert many < 6 * few
