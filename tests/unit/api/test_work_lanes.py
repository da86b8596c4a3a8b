"""Of the work of several clients in one lane: whose turn it is, and who is refused where it is full."""

import asyncio
from threading import Event

import pytest

from alignedserve.api.errors import Overloaded, ResourceUnavailable
from alignedserve.api.work_lanes import Lane, note_class, note_client
from alignedserve.core.request import RequestClass


async def outcome_of(client: str, lane: Lane, request_class: RequestClass) -> str:
    note_client(client)
    note_class(request_class)
    try:
        return await lane.run(lambda: "done")
    except (Overloaded, ResourceUnavailable) as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("request_class", "places", "refusal"),
    [(RequestClass.REAL_TIME, 64, "Overloaded"), (RequestClass.BEST_EFFORT, 48, "ResourceUnavailable")],
)
async def test_a_client_that_fills_a_lane_makes_room_for_another(
    request_class: RequestClass, places: int, refusal: str
) -> None:
    lane, may_go_on = Lane("full", num_threads=1), Event()
    held = asyncio.create_task(lane.run(lambda: may_go_on.wait(20), is_bounded=False))
    many = [asyncio.create_task(outcome_of("many", lane, request_class)) for _ in range(places)]
    await asyncio.sleep(0)
    assert await outcome_of("many", lane, request_class) == refusal
    one = asyncio.create_task(outcome_of("one", lane, request_class))
    assert await many[-1] == refusal  # its latest
    assert not one.done()
    many[0].cancel()  # its client leaves
    may_go_on.set()
    assert await one == "done"
    assert [await task for task in many[1:-1]] == ["done"] * (places - 2)
    assert many[0].cancelled()
    assert await held
    lane.close(waits=True)
