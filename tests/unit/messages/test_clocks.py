"""Times of requests from another host are on this host's clock, in every message that carries one."""

import math
import random
from typing import Any

import msgspec
import pytest

from alignedserve.core.errors import ProtocolError
from alignedserve.messages.clocks import ClockOffset, on_this_clock
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.wire import Message
from tests.support.marks import each
from tests.support.samples import EXAMPLES, request


def arrivals(value: Any) -> list[float]:
    """Return every `arrival_s` anywhere in it, in order."""
    if isinstance(value, dict):
        own = [value["arrival_s"]] if "arrival_s" in value else []
        return own + [found for part in value.values() for found in arrivals(part)]
    if isinstance(value, list):
        return [found for part in value for found in arrivals(part)]
    return []


def plain(message: Message) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def test_there_are_messages_with_requests() -> None:
    assert sum(bool(arrivals(plain(message))) for message in EXAMPLES) >= 7


@each("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_arrival_is_converted_and_nothing_else(message: Message) -> None:
    moved = on_this_clock(message, 4096.0)
    assert arrivals(plain(moved)) == [arrival_s + 4096.0 for arrival_s in arrivals(plain(message))]
    assert on_this_clock(moved, -4096.0) == message


def test_the_offset_is_found_among_messages_of_any_delay() -> None:
    rng = random.Random(7)
    offset = ClockOffset()
    for number in range(100):
        offset.observe(float(number), number + 5000.0 + 0.001 + rng.expovariate(20.0))
    assert 5000.001 <= offset.seconds < 5000.02


def test_clocks_that_drift_apart_are_followed() -> None:
    offset = ClockOffset()
    for number in range(2000):
        offset.observe(float(number), number * 1.001 - 300.0)
    assert offset.seconds == pytest.approx(2000 * 0.001 - 300.0, abs=0.1)


@each("arrival_s", [math.nan, math.inf])
def test_an_arrival_that_is_no_time_is_refused(arrival_s: float) -> None:
    with pytest.raises(ProtocolError):
        on_this_clock(SubmitRequest(request(arrival_s=arrival_s)), 1.0)
