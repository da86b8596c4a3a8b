"""A certificate: what was asked of a server, what was seen, and whether every bound holds."""

from dataclasses import dataclass
from typing import Any

import msgspec

from lab.certification.protocol import Protocol, Speed
from lab.certification.records import Evidence, PhaseRecord
from lab.certification.statistics import Figures, figures_of
from lab.certification.verdict import Bounds, Check, checks_of


@dataclass(frozen=True, slots=True)
class Certificate:
    """Everything that the page and the JSON show."""

    title: str
    about: tuple[tuple[str, str], ...]
    protocol: Protocol
    speed: Speed
    evidence: Evidence
    figures: Figures
    checks: tuple[Check, ...]
    is_simulated: bool = False

    @property
    def holds(self) -> bool:
        """Return whether every bound holds."""
        return all(check.holds for check in self.checks)

    @property
    def missed(self) -> tuple[Check, ...]:
        """Return the bounds that do not hold."""
        return tuple(check for check in self.checks if not check.holds)

    def to_builtins(self) -> dict[str, Any]:
        """Convert to plain values, for JSON."""
        figures = self.figures
        compared = {
            phase.measure: {
                percentile: {"off": _at(phase.off, percentile), "on": _at(phase.on, percentile),
                             "ratio": phase.ratio(percentile)}
                for percentile in ("p50", "p90", "p99", "max")
            }
            for phase in figures.compared()
        }  # fmt: skip
        left_over = figures.left_over
        plain: dict[str, Any] = msgspec.to_builtins(
            {
                "title": self.title,
                "holds": self.holds,
                "is_simulated": self.is_simulated,
                "about": dict(self.about),
                "checks": [{**msgspec.to_builtins(check), "holds": check.holds} for check in self.checks],
                "chat": compared,
                "figures": figures,
                "documents_share": None if left_over is None else left_over.share,
                "protocol": self.protocol,
                "speed": self.speed,
                "notes": self.evidence.notes,
                "phases": [_phase(phase) for phase in self.evidence.phases],
            }
        )
        return plain


def certificate_of(
    *, title: str, about: tuple[tuple[str, str], ...], protocol: Protocol, speed: Speed, evidence: Evidence,
    bounds: Bounds, is_simulated: bool = False,
) -> Certificate:  # fmt: skip
    """Compute figures and verdict."""
    figures = figures_of(evidence, protocol.slo)
    checks = checks_of(evidence, figures, bounds)
    return Certificate(title, about, protocol, speed, evidence, figures, checks, is_simulated)


def _at(distribution: object, percentile: str) -> float | None:
    return None if distribution is None else getattr(distribution, percentile)


def _phase(phase: PhaseRecord) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(phase)
    del plain["gaps_s"], plain["document_gaps_s"]
    return plain
