"""What the driver shares with every batch run."""

from dataclasses import dataclass
from typing import Protocol

from alignedserve.batches.interfaces import LineRunner
from alignedserve.batches.line_scheduling import MeanLineDuration
from alignedserve.batches.location import BatchStores
from alignedserve.config.sections import BatchesConfig


class RunListener(Protocol):
    """Receives the events of batch runs on which the driver acts at once."""

    def on_progress(self) -> None:
        """A line ended, results are pending, or lines can be started."""

    def on_rejection(self, retry_after_s: float) -> None:
        """The cluster accepts no line for this long."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """Stores, line runner and limits of all runs, and the driver that listens to them."""

    stores: BatchStores
    runner: LineRunner
    config: BatchesConfig
    models: tuple[str, ...]  # served here
    line_duration: MeanLineDuration
    listener: RunListener
