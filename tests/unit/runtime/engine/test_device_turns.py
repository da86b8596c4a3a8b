"""Which iterations of a worker somebody waits for, as their requests come, go and come again."""

import contextlib
from typing import cast

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.iterations import Addition, RunIteration
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.engine.device_turns import DeviceTurns
from tests.support.samples import R1, R2, request


class Device:
    """A shared device that notes which iterations are said to be waited for."""

    def __init__(self) -> None:
        self.urgent: list[bool] = []

    def begin(self, *, is_real_time: bool, has_prompt: bool, may_stop: bool) -> None:
        self.urgent.append(is_real_time)

    def end(self, *, is_real_time: bool) -> None:
        pass


def iteration(*of: RequestId, added: tuple[str, ...] = (), removed: tuple[RequestId, ...] = ()) -> RunIteration:
    additions = tuple(
        Addition(
            request(name, request_class=RequestClass.REAL_TIME if name == "r1" else RequestClass.BEST_EFFORT), (), (), 0
        )
        for name in added
    )
    return RunIteration(removed, additions, (), tuple((one, 1) for one in of))


def urgent(*commands: RunIteration) -> list[bool]:
    device = Device()
    turns = DeviceTurns(cast("SharedDevice", device))
    for command in commands:
        with contextlib.ExitStack() as stack:
            stack.enter_context(turns.taken_for(command))
    return device.urgent


def test_iterations_with_a_real_time_request_are_urgent_until_it_leaves() -> None:
    assert urgent(
        iteration(R1, R2, added=("r1", "r2")), iteration(R2), iteration(R1), iteration(R2, removed=(R1,))
    ) == [True, False, True, False]


def test_a_later_attempt_that_takes_the_place_of_an_earlier_one_is_urgent_as_well() -> None:
    first, again = iteration(R1, added=("r1",)), iteration(R1, added=("r1",), removed=(R1,))
    assert urgent(first, again, iteration(R1)) == [True, True, True]
