"""Simulates a sample of the grid's outcomes again, by today's code: does it decide the same?"""

from collections.abc import Collection, Sequence

from experiments.common import Row
from experiments.grid.points import Point, all_points
from experiments.grid.record import Outcome, Record
from experiments.grid.search import Simulate
from experiments.grid.systems import DEFAULT, System, others

_SAID_ONLY = ("cpu_s", "code")


def sample(record: Record, today: Collection[str], *, num_each: int = 1) -> list[Outcome]:
    """Choose the quickest stale outcomes of each kind and code and those that hold least.

    Abandoned ones are chosen only where there are no others.
    """
    found: dict[tuple[str, str], list[Outcome]] = {}
    for one in record:
        if one.code not in today:
            found.setdefault((one.kind, one.code), []).append(one)
    return [one for of_policy in found.values() for one in _chosen(of_policy, num_each)]


def _chosen(outcomes: Sequence[Outcome], num_each: int) -> list[Outcome]:
    outcomes = [one for one in outcomes if one.at_most is None] or outcomes
    quickest = sorted(outcomes, key=lambda one: one.cpu_s)[:num_each]
    hardest = sorted(outcomes, key=lambda one: one.attainment)[:num_each]
    return [*quickest, *(one for one in hardest if one not in quickest)]


def repeat(sampled: Sequence[Outcome], simulated: Simulate) -> list[Row]:
    rows = []
    for one in sampled:
        point = _point(one.point)
        least = 0 if one.at_most is None else one.at_most + 1  # below which it is abandoned again
        again = simulated(point, _system(one.system, point.accelerators), least)
        rows.append(
            {
                "system": one.kind,
                "code": one.code,
                "now": again.code,
                "is_same": is_same(one, again),
                "of": {"point": one.point, "system": one.system},
            }
        )
    return rows


def is_same(recorded: Outcome, again: Outcome) -> bool:
    names = [name for name in recorded.__struct_fields__ if name not in _SAID_ONLY]
    return all(getattr(recorded, name) == getattr(again, name) for name in names)


def _point(name: str) -> Point:
    base, _, seed = name.partition("/seed")
    (point,) = (one for one in all_points() if one.name == base)
    return point.of_seed(int(seed)) if seed else point


def _system(name: str, accelerators: int) -> System:
    return DEFAULT if name == DEFAULT.name(accelerators) else others(accelerators)[name]
