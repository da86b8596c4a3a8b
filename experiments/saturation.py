"""Chat that fills its workers, beside documents: what the floor costs it, and what documents get.

    python -m experiments.saturation                    # about 30 minutes of two cores
    python -m experiments.saturation --shapes elastic   # the other rows stay
    python -m experiments.saturation --page             # only the table of the page

Simulated: two prefill workers and one decode worker, or two elastic ones, each an A100 with Llama-2-13B. Chats of 500
to 1 500 tokens and answers of 300 to 500 have a TTFT of 2 s and a TPOT of 0.2 s; at 2.3/s and 3.4/s they take all that
there is. Beside them documents never end: small ones, or four of a third of a worker's memory each. The same chats come
alone, beside documents with the usual floor, and with a floor of 0: what chat loses between the last two is the floor's
price. Twenty minutes for each of three seeds. The table stands in docs/policies/aligned_slo.md.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.config.sections import Topology
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.intervals import interval
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from experiments.grid.systems import UNION, USUAL_FLOOR, System
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from lab.workload.build import build_workload
from lab.workload.catalogue import Library

RECORD = "scheduling/saturation"
PAGE = Path(__file__).parents[1] / "docs" / "policies" / "aligned_slo.md"
SMALL, LARGE = "512 to 1 024 tokens, 48 at a time", "20 000 tokens, 4 at a time"
DOCUMENTS = {
    SMALL: "prompt=uniform(512,1024), output=300, outstanding=48",
    LARGE: "prompt=20000, output=200, outstanding=4",
}
_SEEDS = (0, 1, 2)
_DURATION_S = 1200.0
_CHAT = "rt: prompt=uniform(500,1500), output=uniform(300,500), ttft=2, tpot=0.2"
_HEAD = "| workers | chats/s | chat holds both, % | longest wait for a token, s | documents, tokens/s |"


class Shape(NamedTuple):
    """Workers, and the loads that they are tried with."""

    system: System
    accelerators: int
    rates: tuple[float, ...]
    documents: tuple[str, ...]


SHAPES = {
    "separate": Shape(
        System(UNION, Topology.DISAGGREGATED, num_prefill=2), 3, (1.6, 1.9, 2.1, 2.2, 2.3), (SMALL, LARGE)
    ),
    "elastic": Shape(System(UNION, Topology.ELASTIC), 2, (3.0, 3.2, 3.4), (SMALL,)),
}
Row = dict[str, Any]


class Case(NamedTuple):
    """One run; no documents: chat alone."""

    shape: str
    documents: str
    rate: float
    floor: float
    seed: int


class Outcome(NamedTuple):
    """Holds the figures of one run."""

    attainment: float
    gap_max_s: float
    document_tokens_per_s: float


def simulate(case: Case) -> Outcome:
    line = f"{_CHAT}, rate={case.rate}"
    if case.documents:
        line += f"; be: {DOCUMENTS[case.documents]}"
    shape = SHAPES[case.shape]
    system = shape.system._replace(best_effort_floor=case.floor)
    workload = build_workload(line, duration_s=_DURATION_S, seed=case.seed, library=Library(None))
    classes = Simulation(system.config(shape.accelerators), workload).run().classes
    chat, documents = classes["rt"], classes.get("be")
    tokens_per_s = documents.loaded_tokens_per_s or 0.0 if documents is not None else 0.0
    return Outcome(chat.attainment or 0.0, longest_wait_s(chat), tokens_per_s)


def longest_wait_s(chat: ClassResult) -> float:
    """Return the longest time without a token, before the first one or after."""
    first_s = chat.ttft_s.distribution.max if chat.ttft_s is not None else 0.0
    return max(first_s, chat.longest_gap_s or 0.0)


def cases_of(name: str) -> list[Case]:
    """Return the runs of a shape, the longest first."""
    shape = SHAPES[name]
    ways = [("", USUAL_FLOOR), *((documents, floor) for documents in shape.documents for floor in (USUAL_FLOOR, 0.0))]
    return [
        Case(name, documents, rate, floor, seed)
        for rate in reversed(shape.rates)
        for documents, floor in ways
        for seed in _SEEDS
    ]


def rows_of(name: str, outcomes: Mapping[Case, Outcome]) -> list[Row]:
    rows = []
    for documents, rate in product(SHAPES[name].documents, SHAPES[name].rates):
        row: Row = {"shape": name, "documents": documents, "rate": rate, "duration_s": _DURATION_S}
        row["seeds"] = list(_SEEDS)
        for way, kind, floor in (
            ("alone", "", USUAL_FLOOR),
            ("beside", documents, USUAL_FLOOR),
            ("unfloored", documents, 0.0),
        ):
            found = [outcomes[Case(name, kind, rate, floor, seed)] for seed in _SEEDS]
            row[way] = {
                "attainment": interval([one.attainment for one in found]),
                "gap_max_s": max(one.gap_max_s for one in found),
                "document_tokens_per_s": interval([one.document_tokens_per_s for one in found]),
            }
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the table of the page: chat beside small documents."""
    lines = [_HEAD, "|---" * _HEAD.count(" | ") + "|---|"]
    for row in rows:
        if row["documents"] == LARGE:
            continue
        ways = [row[way] for way in ("alone", "beside", "unfloored")]
        shares = ", ".join(_share(*way["attainment"]) for way in ways)
        gaps = ", ".join(f"{way['gap_max_s']:.0f}" for way in ways)
        tokens = ", ".join(f"{way['document_tokens_per_s'][0]:.1f}" for way in ways[1:])
        lines.append(f"| {row['shape']} | {row['rate']} | {shares} | {gaps} | {tokens} |")
    return "\n".join(lines) + "\n"


def _share(mean: float, half_width: float | None) -> str:
    interval_percent = f"{100 * (half_width or 0.0):.1f}"
    return f"{100 * mean:.1f}" + (f" ± {interval_percent}" if interval_percent != "0.0" else "")


def with_table(page: str) -> str:
    """Return the page with the table of the record, if there is one."""
    rows = read_figures(RECORD)
    return page if rows is None else put_table(page, "saturation", table(rows))


def main() -> None:
    """Simulate, print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--page", action="store_true", help="write the table of the record, and simulate nothing")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    for name in [] if arguments.page else arguments.shapes:
        outcomes, every = {}, cases_of(name)
        with ProcessPoolExecutor(arguments.processes) as pool:
            for case, outcome in zip(every, pool.map(simulate, every), strict=True):
                outcomes[case] = outcome
                print(*case, *(f"{figure:.4g}" for figure in outcome), flush=True)
        others = [row for row in read_figures(RECORD) or [] if row["shape"] != name]
        rows = sorted([*others, *rows_of(name, outcomes)], key=lambda row: list(SHAPES).index(row["shape"]))
        write_result(RECORD, rows)
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
