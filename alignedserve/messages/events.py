"""Events and commands that every room's logic knows, beside its own.

A logic is told what happened and answers with what to do: `on_event(event, now) -> commands`. It never performs.
"""

import msgspec

from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Message


class _Event(msgspec.Struct, frozen=True):
    """Some are made for every message and every iteration: a struct takes a fifth of a frozen dataclass's time."""


class PeerConnected(_Event, frozen=True):
    """A link to this peer is up, for the first time or again."""

    role: Role
    peer: str


class PeerDisconnected(_Event, frozen=True):
    """The link to this peer is gone: dead, stopped or cut off."""

    role: Role
    peer: str


class Received(_Event, frozen=True):
    """A message of the room's inbound union arrived."""

    peer: str
    message: Message


TICK_S = 0.25


class Ticked(_Event, frozen=True):
    """Time has passed; comes every TICK_S."""


class Send(_Event, frozen=True):
    """Send to a linked peer. A peer that is gone gets nothing; the logic hears of it as PeerDisconnected."""

    peer: str
    message: Message


class SendTo(_Event, frozen=True):
    """Send to an address, dialling it on first use."""

    address: str
    message: Message


CommonEvent = PeerConnected | PeerDisconnected | Received | Ticked
CommonCommand = Send | SendTo
