"""Whether a gateway takes new work, and how much of it is open: what a drain waits for."""

from collections.abc import Mapping
from typing import Any

from alignedserve.api.errors import ServerDraining
from alignedserve.api.models.model_registry import ModelRegistry

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Ticket:
    """One request that a drain waits for, until it is released."""

    def __init__(self, intake: "Intake") -> None:
        self._intake: Intake | None = intake
        intake.num_open += 1

    def release(self) -> None:
        intake, self._intake = self._intake, None
        if intake is not None:
            intake.num_open -= 1


class Intake:
    """Counts the HTTP requests that are open, and refuses new work once it is closed."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_open = 0

    def admit(self, method: str) -> Ticket | None:
        """Return the ticket of a request; None: it is served, but a drain does not wait for it. Raises ServerDraining.

        What only reads is served until the end: whoever asks all the time would never let a drain end otherwise.
        """
        if not self.is_closed:
            return Ticket(self)
        if method in _READING:
            return None
        raise ServerDraining


def release_early(state: Mapping[str, Any]) -> None:
    """Let a drain not wait for this request, which its client can take up again elsewhere."""
    ticket: Ticket | None = state.get("ticket")
    if ticket is not None:
        ticket.release()


class Readiness:
    """Knows whether this gateway wants requests, and whether every model that it serves answers."""

    def __init__(self, models: ModelRegistry, intake: Intake) -> None:
        self._models = models
        self._intake = intake
        self.is_draining = False  # no more requests are to come here

    def missing(self) -> str | None:
        return "draining" if self.is_draining or self._intake.is_closed else self._models.missing()

    @property
    def is_hopeless(self) -> bool:
        return self._models.is_hopeless
