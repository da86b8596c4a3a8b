"""What both ways of sending documents share: batches, and streams where a server has none."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from alignedserve.client.openai_client import CompletionOutcome
from alignedserve.core.errors import PeerLost
from lab.certification.protocol import PlannedBatch
from lab.certification.records import BatchRecord


@dataclass(slots=True)
class DocumentsLog:
    """What is seen of the documents of a phase; kept also when they are cancelled. Times on the monotonic clock."""

    began_s: float = 0.0
    ended_s: float | None = None
    batches: list[BatchRecord] = field(default_factory=list)
    streams: list[CompletionOutcome] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)  # chat may come
    last_step_s: float = 0.0

    def begin(self) -> None:
        self.began_s = self.last_step_s = time.monotonic()
        self.progress.append((self.began_s, 0))

    def step(self, num_ended: int) -> None:
        if num_ended > self.progress[-1][1]:
            self.last_step_s = time.monotonic()
            self.progress.append((self.last_step_s, num_ended))

    def require_progress(self, patience_s: float) -> None:
        if time.monotonic() - self.last_step_s > patience_s:
            raise PeerLost(f"no document came to its end for {patience_s:g} s (--patience)")


class Documents(Protocol):
    """A way to send documents."""

    words: str  # for the page: what it is

    async def run(self, batches: Sequence[PlannedBatch], expected: Mapping[int, str], log: DocumentsLog) -> None:
        """Send all batches and wait for their ends; note everything in `log`.

        Cancelled, it leaves nothing running on the server. Raises PeerError.
        """
