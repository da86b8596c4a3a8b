"""The interface of a component's logic, and the events and commands that every logic shares.

A logic takes events and returns commands: `on_event(event, now) -> commands`. It never performs them.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Message


class _Event(msgspec.Struct, frozen=True): ...


class PeerConnected(_Event, frozen=True):
    """Event: a link to this peer is up, for the first time or again."""

    role: Role
    peer: str


class PeerDisconnected(_Event, frozen=True):
    """Event: the link to this peer is down; the peer died, stopped or was cut off."""

    role: Role
    peer: str


class Received(_Event, frozen=True):
    """Event: a message of the component's inbound union arrived."""

    peer: str
    message: Message


TICK_S = 0.25


class Ticked(_Event, frozen=True):
    """Event: TICK_S have passed since the last one."""


class Send(_Event, frozen=True):
    """Command: send to a linked peer. Dropped if the link is down, which the logic sees as PeerDisconnected."""

    peer: str
    message: Message


class SendTo(_Event, frozen=True):
    """Command: send to an address or a process by its name, dialling it on first use."""

    address: str
    message: Message


class Dial(_Event, frozen=True):
    """Command: keep a link to this address or process from now on, redialling it whenever it is lost."""

    address: str


class StopDialling(_Event, frozen=True):
    """Command: stop dialling this address or process. An open link stays until it is lost."""

    address: str


class HangUp(_Event, frozen=True):
    """Command: dial this address or process no more, and close the link to it; what is under way on it is lost."""

    address: str


CommonEvent = PeerConnected | PeerDisconnected | Received | Ticked

EventT = TypeVar("EventT", contravariant=True)
CommandT = TypeVar("CommandT", covariant=True)


class Logic(Protocol[EventT, CommandT]):
    """The decisions of one component. Touches nothing outside itself, not even a clock."""

    def on_event(self, event: EventT, now: float) -> Sequence[Send | SendTo | Dial | StopDialling | HangUp | CommandT]:
        """Return the commands for an event at this time (seconds, monotonic); same history, same commands."""
