"""A sample of each record's rows, simulated again by today's code: does it decide the same?"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from experiments import (
    accelgen,
    alignedserve,
    alise,
    apt_serve,
    bros,
    unseen,
)
from experiments.common import LabelledCase, Row, chosen, run
from experiments.validity.rows import State, state_of, system_of
from lab.sim.sweep import WorkloadLine

_LABELS_ONLY = ("code", "workload", "knew_more", "sent_s")
_COUNTED_SINCE = "num_recomputed_tokens"  # 0 in records of workers that were not asked for it yet
_HELD = ("rt.attainment", "all.p99_attainment", "all.attainment")
_FULL = apt_serve.WorkerSizes(300, (1, 2, 3), 1)
CASES: Mapping[str, Callable[[], Sequence[LabelledCase]]] = {
    "accelgen": lambda: accelgen.cases_of(is_quick=False),
    "alignedserve": lambda: list(chain.from_iterable(alignedserve.parts_of(is_quick=False))),
    "alise": lambda: alise.cases_of(is_quick=False),
    "apt_serve": lambda: [
        *apt_serve.tables_4_and_5(_FULL),
        *apt_serve.figure_9(_FULL),
        *apt_serve.other_costs(_FULL),
    ],
    "bros": lambda: bros.cases_of(is_quick=False),
    "unseen": lambda: list(chain.from_iterable(unseen.parts_of(is_quick=False))),
}


class Sampled(NamedTuple):
    """A recorded row, and the case that repeats it."""

    row: Row
    case: LabelledCase


def sample(
    rows: Sequence[Row], cases: Sequence[LabelledCase], today: Sequence[str], *, num_each: int = 1
) -> list[Sampled]:
    """Choose the quickest stale rows of each system and code and those that hold least, where there is a case.

    Where all is held many rules decide nothing, and the quickest row is often such a one.
    """
    found: dict[tuple[str, str], list[Sampled]] = {}
    for row in rows:
        if state_of(row, (), today) is State.OLDER and row.get("num_runs", 1) == 1:
            of_row = found.setdefault((system_of(row), str(row["code"])), [])
            of_row += [Sampled(row, case) for case in cases if _is_of(case, row)][:1]
    return list(chain.from_iterable(_chosen(of_row, num_each) for of_row in found.values()))


def _chosen(sampled: Sequence[Sampled], num_each: int) -> list[Sampled]:
    quickest = sorted(sampled, key=lambda one: float(one.row.get("duration_s") or 0.0))[:num_each]
    hardest = sorted((one for one in sampled if _held(one.row) is not None), key=lambda one: _held(one.row) or 0.0)
    return [*quickest, *(one for one in hardest[:num_each] if one not in quickest)]


def _held(row: Row) -> float | None:
    return next((float(row[name]) for name in _HELD if row.get(name) is not None), None)


def _is_of(case: LabelledCase, row: Row) -> bool:
    """Return whether a case repeats a row: the same labels, and the same workload, of which the row must have the line.

    Where data is missing others stand in, and figures would differ by that alone.
    """
    labels: dict[str, Any] = {**case.labels}
    workload = case.case.workload
    if not isinstance(workload, WorkloadLine) or row.get("workload") != workload.line:
        return False
    return all(row[name] == value for name, value in labels.items() if name in row)


def is_same(recorded: Row, again: Row) -> bool:
    rounded = chosen([again], again)[0]
    apart = (*_LABELS_ONLY, *((_COUNTED_SINCE,) if not recorded.get(_COUNTED_SINCE) else ()))
    common = [name for name in recorded if name in rounded and name not in apart]
    return all(recorded[name] == rounded[name] for name in common)


def repeat(sampled: Sequence[Sampled], *, processes: int) -> list[Row]:
    again = run([one.case for one in sampled], processes=processes)
    return [
        {
            "system": system_of(one.row),
            "code": one.row["code"],
            "now": row["code"],
            "is_same": is_same(one.row, row),
            "of": {name: one.row[name] for name in one.case.labels if name in one.row},
        }
        for one, row in zip(sampled, again, strict=True)
    ]
