"""Figures of a certificate, computed from what was seen. Pure; percentiles and attainment are those of core/metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from alignedserve.core import metrics
from alignedserve.core.metrics import Distribution
from alignedserve.core.request import Slo
from lab.certification.protocol import Phase
from lab.certification.records import Evidence, PhaseRecord, StreamRecord

_Z = 1.96  # of a 95 % interval
_MOST_REASONS = 5


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Figures of the streams of one class in one phase."""

    num_sent: int
    num_answered: int
    failures: dict[str, int]  # by kind, most frequent first
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    gap_s: Distribution | None
    attainment: float | None  # None: nothing was sent
    attainment_interval: tuple[float, float] | None  # 95 %
    latest_of_objective: float | None  # the longest time to a first token, by the objective; infinite if one never came
    stalled: float | None = None  # share of the answers that began with a gap longer than metrics.READABLE_GAP_S
    reasons: dict[str, int] = field(default_factory=dict)  # of failures, in the server's words, most frequent first


@dataclass(frozen=True, slots=True)
class Compared:
    """One measure with documents off and on."""

    measure: str  # "TTFT", "TPOT", "gap"
    off: Distribution | None
    on: Distribution | None

    def ratio(self, percentile: str) -> float | None:
        if self.off is None or self.on is None:
            return None
        off, on = getattr(self.off, percentile), getattr(self.on, percentile)
        return float(on / off) if off > 0 else None


@dataclass(frozen=True, slots=True)
class LeftOver:
    """The time that chat leaves, and the share of it that documents used.

    Documents alone have `alone_tokens_per_s`. Beside chat they took `beside_s`; of that time chat, by what a server
    with nothing else to do needs for it, used `chat_share`. The rest is left over.
    """

    alone_tokens_per_s: float
    beside_tokens_per_s: float
    beside_s: float
    chat_share: float

    @property
    def left_tokens_per_s(self) -> float:
        return self.alone_tokens_per_s * (1.0 - self.chat_share)

    @property
    def share(self) -> float | None:
        """Return the part of it that they got; None where chat leaves nothing."""
        return self.beside_tokens_per_s / self.left_tokens_per_s if self.chat_share < 1.0 else None


@dataclass(frozen=True, slots=True)
class LineFigures:
    """What became of the lines of one phase."""

    num_lines: int
    num_answered: int
    num_lost: int
    num_doubled: int
    num_wrong: int
    num_failed: int
    num_expired: int
    num_windows: int
    num_windows_held: int
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a certificate; None where a phase is missing."""

    alone: StreamFigures | None
    beside: StreamFigures | None
    documents_alone: StreamFigures | None  # where documents were streams
    documents_beside: StreamFigures | None
    left_over: LeftOver | None
    lines: dict[str, LineFigures]  # by phase
    share_of_chats_beside: float | None  # of those that were sent, while documents were there
    pictured: dict[str, StreamFigures] = field(default_factory=dict)  # of chats with a picture, by phase
    plain: dict[str, StreamFigures] = field(default_factory=dict)  # of those without, where others have one

    def compared(self) -> tuple[Compared, ...]:
        return _compared(self.alone, self.beside)

    def documents_compared(self) -> tuple[Compared, ...]:
        return _compared(self.documents_alone, self.documents_beside)

    def attainment_loss(self) -> float | None:
        if self.alone is None or self.beside is None:
            return None
        if self.alone.attainment is None or self.beside.attainment is None:
            return None
        return self.alone.attainment - self.beside.attainment


def figures_of(evidence: Evidence, slo: Slo) -> Figures:
    alone, beside, documents = (evidence.phase(phase) for phase in Phase)
    pictured, plain = (_by_picture(evidence, slo, has_picture=has_picture) for has_picture in (True, False))
    return Figures(
        alone=None if alone is None else _chat_of(alone, slo),
        beside=None if beside is None else _chat_of(beside, slo),
        documents_alone=_documents_of(documents),
        documents_beside=_documents_of(beside),
        left_over=_left_over(evidence.chats_per_s, beside, documents),
        lines={record.phase.value: _lines_of(record) for record in (beside, documents) if record is not None},
        share_of_chats_beside=_share_beside(beside),
        pictured=pictured,
        plain=plain if pictured else {},
    )


def _chat_of(phase: PhaseRecord, slo: Slo) -> StreamFigures:
    chats = phase.chats_beside
    return replace(_streams(chats, phase.gaps_s, slo), latest_of_objective=_latest(chats, slo))


def _by_picture(evidence: Evidence, slo: Slo, *, has_picture: bool) -> dict[str, StreamFigures]:
    texts = {}
    for phase in evidence.phases:
        chats = [chat for chat in phase.chats_beside if chat.has_picture is has_picture]
        if chats:
            texts[phase.phase.value] = replace(_streams(chats, (), slo), latest_of_objective=_latest(chats, slo))
    return texts


def _documents_of(phase: PhaseRecord | None) -> StreamFigures | None:
    if phase is None or not phase.documents:
        return None
    return _streams(phase.documents, phase.document_gaps_s, Slo())


def _streams(streams: Sequence[StreamRecord], gaps_s: Sequence[float], slo: Slo) -> StreamFigures:
    answered = [stream for stream in streams if stream.failure is None]
    failures = Counter(stream.failure for stream in streams if stream.failure is not None)
    reasons = Counter(stream.reason or stream.failure for stream in streams if stream.failure is not None)
    num_met = sum(stream.has_met(slo) for stream in streams)
    gap = metrics.describe(gaps_s)
    longest_s = [stream.longest_gap_s for stream in streams if stream.longest_gap_s is not None]
    if gap is not None and longest_s:
        gap = replace(gap, max=max(longest_s))
    return StreamFigures(
        num_sent=len(streams),
        num_answered=len(answered),
        failures=dict(failures.most_common()),
        ttft_s=metrics.describe([stream.ttft_s for stream in streams if stream.ttft_s is not None]),
        tpot_s=metrics.describe([stream.tpot_s for stream in answered if stream.tpot_s is not None]),
        gap_s=gap,
        attainment=metrics.attainment(num_met, len(streams)),
        attainment_interval=wilson(num_met, len(streams)),
        latest_of_objective=None,
        stalled=metrics.stalled([stream.longest_gap_s or 0.0 for stream in streams if stream.num_tokens]),
        reasons=dict(reasons.most_common(_MOST_REASONS)),
    )


def _latest(chats: Sequence[StreamRecord], slo: Slo) -> float | None:
    if slo.ttft_s is None or not chats:
        return None
    return max(float("inf") if chat.ttft_s is None else chat.ttft_s / slo.ttft_s for chat in chats)


def wilson(num_met: int, count: int) -> tuple[float, float] | None:
    """Return Wilson's 95 % interval of a share: between what bounds the true one is, after so many requests."""
    if not count:
        return None
    share, z2 = num_met / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * ((share * (1 - share) + z2 / (4 * count)) / count) ** 0.5 / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _left_over(chats_per_s: float, beside: PhaseRecord | None, alone: PhaseRecord | None) -> LeftOver | None:
    if beside is None or alone is None or not beside.documents_s or not alone.documents_s or chats_per_s <= 0:
        return None
    if not alone.num_output_tokens:
        return None
    answered = [chat for chat in beside.chats_beside if chat.failure is None]
    return LeftOver(
        alone_tokens_per_s=alone.num_output_tokens / alone.documents_s,
        beside_tokens_per_s=beside.num_output_tokens / beside.documents_s,
        beside_s=beside.documents_s,
        chat_share=len(answered) / chats_per_s / beside.documents_s,
    )


def _lines_of(phase: PhaseRecord) -> LineFigures:
    batches, failures = phase.batches, phase.failures_of_lines()
    return LineFigures(
        num_lines=sum(batch.num_lines for batch in batches),
        num_answered=sum(batch.num_answered for batch in batches),
        num_lost=sum(batch.num_lost for batch in batches),
        num_doubled=sum(batch.num_doubled for batch in batches),
        num_wrong=sum(batch.num_wrong for batch in batches),
        num_failed=sum(failures.values()),
        num_expired=sum(batch.num_expired for batch in batches),
        num_windows=len(batches),
        num_windows_held=sum(batch.has_held_window for batch in batches),
        failures=failures,
    )


def _share_beside(phase: PhaseRecord | None) -> float | None:
    if phase is None or not phase.chats:
        return None
    return len(phase.chats_beside) / len(phase.chats)


def _compared(off: StreamFigures | None, on: StreamFigures | None) -> tuple[Compared, ...]:
    measures = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("gap", "gap_s"))
    return tuple(
        Compared(name, None if off is None else getattr(off, field), None if on is None else getattr(on, field))
        for name, field in measures
    )
