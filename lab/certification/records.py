"""What was seen in each phase: chats, batches and their lines. Times count from the start of the phase's chat."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from alignedserve.core.metrics import meets_slo
from alignedserve.core.request import Slo
from lab.certification.protocol import Phase


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What a client saw of a chat, or of a streamed document."""

    sent_s: float
    ended_s: float
    num_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    longest_gap_s: float | None = None
    failure: str | None = None  # its kind, such as "http 503"
    reason: str | None = None  # what the server said of that, without what it may have quoted of the request
    has_picture: bool = False

    def has_met(self, slo: Slo) -> bool:
        """Return whether it was answered, in time."""
        end_to_end_s = self.ended_s - self.sent_s
        return self.failure is None and meets_slo(slo, ttft=self.ttft_s, tpot=self.tpot_s, end_to_end=end_to_end_s)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch, and what became of its lines."""

    name: str
    window_s: float
    num_lines: int
    began_s: float = 0.0
    ended_s: float | None = None  # None: it had not ended when the phase did
    status: str = "completed"
    num_answered: int = 0
    num_lost: int = 0  # without any record
    num_doubled: int = 0  # records beyond the first
    num_wrong: int = 0  # a record of no line, one that cannot be read, or another answer than alone
    num_expired: int = 0  # in the error file, as their window had ended
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)  # by kind
    wrong: tuple[str, ...] = ()  # some of them, in words

    @property
    def has_held_window(self) -> bool:
        """Return whether it ended within its window, with every line."""
        if self.ended_s is None or self.status != "completed" or self.num_expired:
            return False
        return self.ended_s - self.began_s <= self.window_s


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One phase.

    `gaps_s`: between tokens of chat, all or an even sample; live, of chats beside documents only.
    """

    phase: Phase
    duration_s: float
    chats: tuple[StreamRecord, ...] = ()
    gaps_s: tuple[float, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    documents: tuple[StreamRecord, ...] = ()  # where they were streams
    document_gaps_s: tuple[float, ...] = ()
    documents_began_s: float = 0.0
    documents_ended_s: float | None = None  # None: they had not ended when the phase did
    progress: tuple[tuple[float, int], ...] = ()  # seconds, lines that have ended
    client_late_s: float | None = None  # p99 of the client's own lateness
    failure: str | None = None  # why it ended early

    @property
    def is_whole(self) -> bool:
        """Return whether it went to its end."""
        return self.failure is None

    @property
    def documents_s(self) -> float | None:
        """Return how long documents took; None while they had not ended."""
        return None if self.documents_ended_s is None else self.documents_ended_s - self.documents_began_s

    @property
    def beside_until_s(self) -> float:
        """Return until when a chat is sent beside documents; inf where they have not ended, or there are none."""
        if not self.phase.has_documents or self.documents_ended_s is None:
            return math.inf
        return self.documents_ended_s

    @property
    def chats_beside(self) -> tuple[StreamRecord, ...]:
        """Return the chats that were sent while documents were there; without documents all."""
        return tuple(chat for chat in self.chats if chat.sent_s < self.beside_until_s)

    @property
    def num_output_tokens(self) -> int:
        return sum(batch.num_output_tokens for batch in self.batches)

    def failures_of_lines(self) -> dict[str, int]:
        """Count lines that failed, by kind."""
        return dict(sum((Counter(batch.failures) for batch in self.batches), Counter[str]()))


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured."""

    phases: tuple[PhaseRecord, ...]
    chats_per_s: float  # what the server does when there is nothing else to do
    notes: tuple[str, ...] = ()  # what was done otherwise than the protocol says

    def phase(self, phase: Phase) -> PhaseRecord | None:
        """Return what was seen of a phase, if it was begun."""
        return next((record for record in self.phases if record.phase is phase), None)
