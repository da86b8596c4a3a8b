"""How much chat is held beside documents and alone: the load at which nine of ten chats hold, without pauses.

    python -m experiments.capacity [--policies aligned_slo qoserve] [--minutes 3] [--objectives tight mixed] [--record]

The grid's traces on two accelerators (experiments/grid/points.py). A load is held where 90 % of the chats meet every
objective, 99 % of their tokens are in time (fluidity), and no answer that has begun is silent for more than 2 s.
Loads are searched by bisection, in steps of eight points. Documents are compared at the load that every policy holds.
"""

from itertools import product
from typing import Any, NamedTuple

from alignedserve.config.sections import Topology
from benchmarks.measuring.arguments import parser_of
from experiments.common import print_table, write_record
from experiments.grid.points import OBJECTIVES, TIGHT, TRACES, Point
from experiments.grid.systems import UNION, System
from lab.sim.simulation import Simulation

LOADS = tuple(round(0.3 + 0.08 * step, 2) for step in range(18))
HELD, FLUID, LONGEST_GAP_S = 0.9, 0.99, 2.0
COLUMNS = {
    "policy": "policy",
    "workload": "workload",
    "load": "load held",
    "attainment": "chats that hold",
    "fluidity": "tokens in time",
    "longest_gap_s": "longest gap",
    "documents_tokens_per_s": "documents, tokens/s",
}


def measured(policy: str, point: Point) -> dict[str, Any]:
    """Simulate one load."""
    topology = Topology.ELASTIC if policy == UNION else Topology.COLOCATED
    config = System(policy, topology, knows_classes=True).config(point.accelerators)
    classes = Simulation(config, point.workload().build()).run().classes
    chat, documents = classes["rt"], classes.get("be")
    return {
        "attainment": round(chat.attainment or 0.0, 4),
        "fluidity": round(chat.fluidity or 0.0, 4),
        "longest_gap_s": round(chat.longest_gap_s or 0.0, 2),
        "documents_tokens_per_s": None if documents is None else round(documents.loaded_tokens_per_s or 0.0, 1),
    }


def is_held(row: dict[str, Any]) -> bool:
    """Return whether these figures are within the bounds."""
    return bool(row["attainment"] >= HELD and row["fluidity"] >= FLUID and row["longest_gap_s"] <= LONGEST_GAP_S)


class Workload(NamedTuple):
    """What is searched for its load."""

    trace: str
    objectives: str
    has_documents: bool
    minutes: float

    @property
    def name(self) -> str:
        """Name it in tables."""
        return f"{self.trace}, {self.objectives}, {'documents beside' if self.has_documents else 'chat alone'}"

    def measured(self, policy: str, load: float) -> dict[str, Any]:
        """Simulate it at this load."""
        point = Point(self.trace, load, self.objectives, 2, self.has_documents, minutes=self.minutes)
        return {"policy": policy, "workload": self.name, "load": load, **measured(policy, point)}

    def capacity(self, policy: str) -> dict[str, Any]:
        """Find the highest load that is held; its figures, or those of the least load where none is."""
        rows: dict[int, dict[str, Any]] = {}

        def row_of(step: int) -> dict[str, Any]:
            if step not in rows:
                rows[step] = self.measured(policy, LOADS[step])
            return rows[step]

        low, high = -1, len(LOADS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_held(row_of(middle)) else (low, middle)
        return row_of(low) if low >= 0 else {**row_of(0), "load": 0.0}


def main() -> None:
    """Search every workload for every policy."""
    parser = parser_of(__doc__)
    parser.add_argument("--policies", nargs="+", default=[UNION, "qoserve"])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=[TIGHT])
    parser.add_argument("--minutes", type=float, default=3.0, help="of arrivals, simulated")
    parser.add_argument("--record", action="store_true", help="in results/capacity.json")
    given = parser.parse_args()
    held, equal = [], []
    for trace, objectives, has_documents in product(TRACES, given.objectives, (True, False)):
        workload = Workload(trace, objectives, has_documents, given.minutes)
        rows = [workload.capacity(policy) for policy in given.policies]
        held += rows
        if has_documents and (load := min(row["load"] for row in rows)) > 0.0:
            equal += [workload.measured(policy, load) for policy in given.policies]
    print_table(held, COLUMNS)
    print_table(equal, COLUMNS, title="at the load that all hold")
    if given.record:
        write_record("capacity", {"minutes": given.minutes, "rows": held, "at_equal_load": equal})


if __name__ == "__main__":
    main()
