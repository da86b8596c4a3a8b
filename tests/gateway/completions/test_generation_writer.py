"""What came before an error reaches the client, also where the stream has not begun or the client does not keep up."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alignedserve.gateway.streaming import GenerationWriter


class BreaksOff:
    """A generation of two choices, of which one has a text and the other fails."""

    is_complete = False

    def call_when_ready(self, reader: Callable[[], None]) -> None:
        """Have everything already."""

    def read_new(self) -> Iterator[tuple[int, bytes]]:
        yield 0, b"first"
        raise RuntimeError("the second failed")


class Plain:
    def events(self, index: int, delta: bytes) -> bytes:
        return delta


class Client:
    """Takes nothing at once."""

    has_started = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def start(self) -> None:
        self.has_started = True

    def write_events(self, events: bytes) -> bool:
        return False

    async def send_events(self, events: bytes) -> None:
        self.sent.append(events)


async def test_what_came_before_an_error_is_sent() -> None:
    client: Any = Client()
    generation: Any = BreaksOff()
    formatter: Any = Plain()
    with pytest.raises(RuntimeError, match="the second failed"):
        await GenerationWriter(generation, formatter, client).write_all()
    assert client.sent == [b"first"]
