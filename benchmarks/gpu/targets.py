"""Targets of the GPU path, and whether the figures of benchmarks.gpu reach them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from benchmarks.engine.iterations import BESIDE_COPIES, DECODE, PREFILL
from benchmarks.measuring.pinned_copies import OFFLOAD, PREFETCH

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
Figures = Mapping[str, Any]  # of one part, as it recorded them

_EVEN, _MIXED = 0, 1  # of the decode batches, in the order in which they are measured
_OURS, _NAIVE = "triton", "undivided"


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """One target and what was seen. Every field is plain JSON."""

    what: str
    target: str
    seen: str  # empty: nothing
    verdict: str


class _Seen(NamedTuple):
    figure: float
    unit: str = ""
    beside: str = ""

    @override
    def __str__(self) -> str:
        figure = f"{self.figure:.1%}" if self.unit == "%" else f"{self.figure:.3g}{self.unit}"
        return f"{figure}{self.beside}"


class _TargetRule(NamedTuple):
    part: str
    what: str
    limit: float
    is_upper: bool
    unit: str
    find: Callable[[Figures], _Seen | None]

    def outcome(self, figures: Figures | None, *, is_toy: bool) -> TargetOutcome:
        limit = f"{'at most' if self.is_upper else 'at least'} {_Seen(self.limit, self.unit)}"
        seen = None if figures is None else self.find(figures)
        if seen is None:
            return TargetOutcome(self.what, limit, "", NOT_MEASURED)
        is_met = seen.figure <= self.limit if self.is_upper else seen.figure >= self.limit
        verdict = MET if is_met else MISSED
        return TargetOutcome(self.what, limit, str(seen), NOT_MEASURED if is_toy else verdict)


def outcomes(parts: Mapping[str, Figures], *, is_toy: bool) -> list[TargetOutcome]:
    """Return the outcome of every target. Results of a toy are no measurement."""
    return [target.outcome(parts.get(target.part), is_toy=is_toy) for target in _TARGETS]


def _decode_cases(figures: Figures) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in figures.get("rows", ()) if row["kernel"] == "decode"))


def _decode_row(figures: Figures, case: int, by: str) -> Figures | None:
    names = _decode_cases(figures)
    rows: Iterator[Figures] = (
        row
        for row in figures.get("rows", ())
        if row["kernel"] == "decode" and row["case"] in names[case : case + 1] and row["by"] == by
    )
    return next(rows, None)


def _of_copy_bandwidth(figures: Figures) -> _Seen | None:
    row = _decode_row(figures, _EVEN, _OURS)
    if row is None:
        return None
    copied = figures["ceilings"]["copy_gb_per_s"]
    return _Seen(row["gb_per_s"] / copied, "%", f" ({row['gb_per_s']:,.0f} of {copied:,.0f} GB/s)")


def _mixed_against_even(figures: Figures) -> _Seen | None:
    rows = [_decode_row(figures, _MIXED, by) for by in (_OURS, _NAIVE)]
    ratios = [None if row is None else row["against_aligned"] for row in rows]
    if ratios[0] is None:
        return None
    naive = "" if ratios[1] is None else f" (naive kernel {ratios[1]:.3g} times)"
    return _Seen(ratios[0], " times", naive)


def _iteration(kind: str, unit: str) -> Callable[[Figures], _Seen | None]:
    def find(figures: Figures) -> _Seen | None:
        row = _first(figures.get("rows", ()), kind=kind)
        if row is None:
            return None
        return _Seen(row["ratio"], unit, f" ({row['milliseconds']:.2f} for {row['bound_milliseconds']:.2f} ms)")

    return find


def _pinned(operation: str) -> Callable[[Figures], _Seen | None]:
    def find(figures: Figures) -> _Seen | None:
        rows = [row for row in figures.get("rows", ()) if _way(row) == ("pinned", operation)]
        if not rows:
            return None
        row = rows[-1]  # the largest model's blocks, the most of them
        return _Seen(row["share"], "%", f" ({row['gb_per_s']:.1f} of {row['plain_gb_per_s']:.1f} GB/s)")

    return find


def _way(row: Figures) -> tuple[str, str]:
    return row["transport"], row["operation"]


def _first(rows: Iterable[Figures], **wanted: str) -> Figures | None:
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


_TARGETS = (
    _TargetRule("kernels", "decode attention, 64 x 4096, of copy bandwidth", 0.85, False, "%", _of_copy_bandwidth),
    _TargetRule(
        "kernels", "60 x 256 + 4 x 16384 against as many tokens aligned", 1.1, True, " times", _mixed_against_even
    ),
    _TargetRule(
        "iterations",
        "decode iteration, 8B, 64 x 2048, against reading its bytes",
        1.25,
        True,
        " times",
        _iteration(DECODE, " times"),
    ),
    _TargetRule("iterations", "prefill of 4096 tokens, of the matrix rate", 0.65, False, "%", _iteration(PREFILL, "%")),
    _TargetRule(
        "iterations",
        "decode iteration beside transfers against alone",
        1.05,
        True,
        " times",
        _iteration(BESIDE_COPIES, " times"),
    ),
    _TargetRule("transfers", "offload of blocks, of a plain pinned copy", 0.9, False, "%", _pinned(OFFLOAD)),
    _TargetRule("transfers", "prefetch of blocks, of a plain pinned copy", 0.9, False, "%", _pinned(PREFETCH)),
)
