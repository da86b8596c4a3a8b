"""Observers of a cluster's start, and its patience: a start may take as long as it makes progress."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from alignedserve.cluster.sizing import SizeChoice
from alignedserve.process.loading_progress import Progress
from alignedserve.runtime.device_check.choice import DeviceChoice

logger = logging.getLogger(__name__)


class StartObserver(Protocol):
    """A receiver of what happens while a cluster starts."""

    def device_chosen(self, choice: DeviceChoice) -> None:
        """Say what engine.device=auto means here, where there is something to say."""

    def sizes_chosen(self, choice: SizeChoice, *, has_others: bool = False) -> None:
        """Say what was chosen, before anything is started. `has_others`: beside it other models are served."""

    def model_loading(self, progress: Progress) -> None:
        """Show how much of the model the workers have loaded, on average."""


class LoggingObserver:
    """Writes what was chosen to the log."""

    def device_chosen(self, choice: DeviceChoice) -> None:
        choice.log()

    def sizes_chosen(self, choice: SizeChoice, *, has_others: bool = False) -> None:
        logger.info(choice.line(names_model=has_others))
        for warning in choice.remarks(names_model=has_others):
            logger.warning(warning)

    def model_loading(self, progress: Progress) -> None:
        """Show nothing."""


class Patience:
    """The time left to a start: `timeout_s` from its last progress."""

    def __init__(
        self,
        look: Callable[[], Sequence[Progress | None]],
        timeout_s: float,
        observer: StartObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._look, self._observer, self._clock = look, observer, clock
        self._known: list[Progress | None] = []
        self._ends_s = clock() + timeout_s

    def is_over(self) -> bool:
        found = list(self._look())
        if found != self._known:
            self._known, self._ends_s = found, self._clock() + self.timeout_s
            self._observer.model_loading(_mean([progress for progress in found if progress is not None]))
        return self._clock() >= self._ends_s


def _mean(found: Sequence[Progress]) -> Progress:
    return Progress(*(sum(counts) // len(found) for counts in zip(*found, strict=True)))
