"""Bounds of a certificate, and whether they hold."""

from collections.abc import Iterator
from dataclasses import dataclass

from lab.certification.protocol import Phase
from lab.certification.records import Evidence
from lab.certification.statistics import Figures

_TIMED_OUT = frozenset({"http 504", "timeout", "error event", "disconnected"})  # as openai_client.py names them


@dataclass(frozen=True, slots=True)
class Bounds:
    """What must hold; None: not asked for."""

    max_attainment_loss: float = 1.0  # points
    max_ttft_ratio: float = 3.0  # of the latest first token to its objective
    min_documents_share: float = 0.85  # of what chat leaves over
    max_lost: int = 0
    max_doubled: int = 0
    max_wrong: int = 0
    max_failed: int = 0  # lines
    max_timeouts: int = 0  # answers of 504 to chats and lines, and answers that broke off
    max_missed_windows: int = 0
    min_beside: float = 0.5  # of the chats that were sent, with documents beside them
    max_ttft_p99_ratio: float | None = None  # beside documents to alone
    max_tpot_p99_ratio: float | None = None
    max_gap_p99_ratio: float | None = None
    min_attainment: float | None = None  # percent, beside documents


@dataclass(frozen=True, slots=True)
class Check:
    """One bound and what was measured."""

    name: str
    measured: float | None  # None: could not be measured
    bound: float
    is_least: bool = False  # the bound is a lower one
    unit: str = ""

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return False
        rounded = round(self.measured, 9)
        return rounded >= self.bound if self.is_least else rounded <= self.bound


def checks_of(evidence: Evidence, figures: Figures, bounds: Bounds) -> tuple[Check, ...]:
    return (*_of_chat(figures, bounds), *_of_documents(evidence, figures, bounds))


def _of_chat(figures: Figures, bounds: Bounds) -> Iterator[Check]:
    beside, loss = figures.beside, figures.attainment_loss()
    yield Check("attainment lost beside documents", _percent(loss), bounds.max_attainment_loss, unit="points")
    if bounds.min_attainment is not None:
        measured = None if beside is None else _percent(beside.attainment)
        yield Check("attainment beside documents", measured, bounds.min_attainment, is_least=True, unit="%")
    latest = None if beside is None else beside.latest_of_objective
    yield Check("latest first token, by its objective", latest, bounds.max_ttft_ratio, unit="x")
    there = _percent(figures.share_of_chats_beside)
    least = _percent(bounds.min_beside) or 0.0
    yield Check("chats with documents beside them", there, least, is_least=True, unit="%")
    limits = (bounds.max_ttft_p99_ratio, bounds.max_tpot_p99_ratio, bounds.max_gap_p99_ratio)
    for compared, limit in zip(figures.compared(), limits, strict=True):
        if limit is not None:
            yield Check(f"p99 of {compared.measure}, on to off", compared.ratio("p99"), limit, unit="x")


def _of_documents(evidence: Evidence, figures: Figures, bounds: Bounds) -> Iterator[Check]:
    share = None if figures.left_over is None else figures.left_over.share
    yield Check(
        "documents, of what chat leaves over", _percent(share), _percent(bounds.min_documents_share) or 0.0,
        is_least=True, unit="%",
    )  # fmt: skip
    lines = tuple(figures.lines.values())
    counted = (
        ("lines lost", lambda lines: lines.num_lost, bounds.max_lost),
        ("lines doubled", lambda lines: lines.num_doubled, bounds.max_doubled),
        ("lines wrong", lambda lines: lines.num_wrong, bounds.max_wrong),
        ("lines failed", lambda lines: lines.num_failed, bounds.max_failed),
        ("windows missed", lambda lines: lines.num_windows - lines.num_windows_held, bounds.max_missed_windows),
    )
    for name, count, limit in counted:
        yield Check(name, float(sum(map(count, lines))) if lines else None, limit)
    yield Check("answers of 504, or broken off", float(_timeouts(evidence)), bounds.max_timeouts)
    yield Check("phases that went to their end", float(sum(phase.is_whole for phase in evidence.phases)), len(Phase),
                is_least=True)  # fmt: skip


def _timeouts(evidence: Evidence) -> int:
    of_chats = sum(chat.failure in _TIMED_OUT for phase in evidence.phases for chat in phase.chats)
    of_lines = [phase.failures_of_lines() for phase in evidence.phases]
    return of_chats + sum(count for failures in of_lines for kind, count in failures.items() if kind in _TIMED_OUT)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share
