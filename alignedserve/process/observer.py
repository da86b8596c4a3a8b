"""What may stand beside a logic in its process: it sees every decision, and has no part in it."""

from collections.abc import Sequence
from typing import Any, Protocol

from alignedserve.messages.events import Send, SendTo
from alignedserve.messages.wire import Message


class Observer(Protocol):
    """Sees what a logic was told and decided."""

    def observe(self, event: Any, now: float, commands: Sequence[Any]) -> Sequence[Send | SendTo]:
        """Look at a decision, once its commands are performed; return what else is to be sent. Must be quick."""


class Relay(Protocol):
    """Passes messages on that are none of the logic's business."""

    def relay(self, peer: str, message: Message) -> Sequence[Send] | None:
        """Return what is to be sent for this message; None: it is for the logic."""
