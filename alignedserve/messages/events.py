"""Events and commands that every room's logic knows, beside its own.

A logic is told what happened and answers with what to do: `on_event(event, now) -> commands`. It never performs.
"""

from dataclasses import dataclass

from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Message


@dataclass(frozen=True, slots=True)
class PeerLinked:
    """A link to this peer is up, for the first time or again."""

    role: Role
    peer: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to this peer is gone: dead, stopped or cut off."""

    role: Role
    peer: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the room's inbound union arrived."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; comes a few times a second."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a linked peer. A peer that is gone gets nothing; the logic hears of it as PeerLost."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send to an address, dialling it on first use."""

    address: str
    message: Message


CommonEvent = PeerLinked | PeerLost | Received | Ticked
CommonCommand = Send | SendTo
