"""Passes questions for timelines on between gateways, which have no links to each other."""

from collections.abc import Mapping, Sequence

import msgspec

from alignedserve.messages.events import Send
from alignedserve.messages.request_notes import AskTimeline, TimelineTold
from alignedserve.messages.wire import Message


class TimelineRelay:
    """A Relay (runtime.process.observer). It keeps nothing: an answer names the gateway that it is for."""

    def __init__(self, gateways: Mapping[str, str]) -> None:
        """`gateways`: the connected ones, with their nodes; the logic's own."""
        self._gateways = gateways

    def relay(self, peer: str, message: Message) -> Sequence[Send] | None:
        """Pass a question to every other gateway, and an answer to the asking one; leave all else to the logic."""
        match message:
            case AskTimeline():
                return self._ask(peer, message)
            case TimelineTold():
                told = msgspec.structs.replace(message, num_asked=None)
                return [Send(message.asker, told)] if message.asker in self._gateways else []
        return None

    def _ask(self, peer: str, message: AskTimeline) -> list[Send]:
        question = msgspec.structs.replace(message, asker=peer)
        asked = [Send(gateway, question) for gateway in self._gateways if gateway != peer]
        return [Send(peer, TimelineTold(message.number, peer, num_asked=len(asked))), *asked]
