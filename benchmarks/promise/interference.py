"""The frontier of interference: how much documents prolong chat's gaps, against what documents get, simulated.

    python -m benchmarks.promise.interference  # about 40 minutes of one core
    python -m benchmarks.promise.interference --shapes colocated --seeds 1 --duration 60

Machine and load are those of `benchmarks.promise.chat_beside_documents`: a model of 125M OPT's shape on two cores; chat
at 0.4/s for each worker, TTFT 2 s, TPOT 1 s; a backlog of documents that never ends. 25 minutes for each of the seeds,
with `scheduling.interference` unset and at each bound, and the same chats and documents alone. Written are the record
and the picture of docs/experiments/interference.md. Targets at 1.1: p99 of TPOT at most 1.15 times that of chat alone,
documents at 40 % or more of what they get alone (what chat leaves of that is less).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.sections import SchedulingConfig, Topology
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.intervals import interval
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.promise.chat_beside_documents import RATE, config_of, workload_of
from lab.sim.report.svg import PlotFrame, Scale, element, from_zero, mark, path, text
from lab.sim.result import Measure
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload

SHAPES: dict[str, tuple[Topology, int, int]] = {  # topology, workers that decode, blocks of the pool
    "elastic": (Topology.ELASTIC, 2, 0),
    "colocated": (Topology.COLOCATED, 1, 0),
    "disaggregated": (Topology.DISAGGREGATED, 1, 20_000),
}
BOUNDS = (None, 2.0, 1.5, 1.2, 1.1, 1.05)
PICTURE = Path(__file__).parents[2] / "docs" / "experiments" / "interference.svg"
_DOCUMENTS_PER_S = 0.9  # more than a worker answers
_COLOURS = ("#0b7285", "#c2410c", "#5b21b6")


class Run(NamedTuple):
    """What chat and documents got in one run; 0 where there were none."""

    tpot_p50_s: float
    tpot_p99_s: float
    gap_max_s: float
    attainment: float
    document_tokens_per_s: float


def simulate(name: str, bound: float | None, workload: Workload, duration_s: float) -> Run:
    config = config_of(*SHAPES[name])
    scheduling = SchedulingConfig(policy="aligned_slo", interference=bound)
    cluster = msgspec.structs.replace(config.cluster, scheduling=scheduling)
    result = Simulation(replace(config, cluster=cluster, duration_s=duration_s), workload).run()
    documents = result.classes.get("documents")
    tokens_per_s = documents.tokens_per_s if documents is not None else 0.0
    chat = result.classes.get("chat")
    if chat is None:
        return Run(0.0, 0.0, 0.0, 0.0, tokens_per_s)
    tpot_s, gap_s = chat.tpot_s, chat.max_tbt_s
    return Run(_at(tpot_s, 50), _at(tpot_s, 99), _at(gap_s, -1), chat.attainment or 0.0, tokens_per_s)


def measure(name: str, seeds: Sequence[int], duration_s: float) -> list[dict[str, Any]]:
    num_workers = SHAPES[name][1]
    num_documents = int(_DOCUMENTS_PER_S * duration_s) * num_workers

    loads = [workload_of(seed, num_documents, RATE * num_workers, duration_s=duration_s) for seed in seeds]

    def run_each(bound: float | None, kinds: Collection[str]) -> list[Run]:
        return [simulate(name, bound, _only(kinds, load), duration_s) for load in loads]

    alone = run_each(None, ("chat",))
    documents = [one.document_tokens_per_s for one in run_each(None, ("documents",))]
    rows = []
    for bound in BOUNDS:
        runs = run_each(bound, ("chat", "documents"))
        row = {
            "shape": name,
            "bound": bound,
            "duration_s": duration_s,
            "seeds": list(seeds),
            "tpot_p99_ratio": _interval([one.tpot_p99_s / by.tpot_p99_s for one, by in zip(runs, alone, strict=True)]),
            "tpot_p50_ratio": _interval([one.tpot_p50_s / by.tpot_p50_s for one, by in zip(runs, alone, strict=True)]),
            "gap_max_s": max(one.gap_max_s for one in runs),
            "gap_max_alone_s": max(one.gap_max_s for one in alone),
            "attainment": min(one.attainment for one in runs),
            "document_tokens_per_s": _interval([one.document_tokens_per_s for one in runs]),
            "share_of_alone": _interval(
                [one.document_tokens_per_s / tokens for one, tokens in zip(runs, documents, strict=True)]
            ),
        }
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def _only(kinds: Collection[str], load: Workload) -> Workload:
    return replace(load, requests=tuple(one for one in load.requests if one.class_name in kinds))


def line_of(row: dict[str, Any]) -> str:
    bound = "none" if row["bound"] is None else f"{row['bound']:g}"
    p50, p99 = row["tpot_p50_ratio"], row["tpot_p99_ratio"]
    tokens, share = row["document_tokens_per_s"], row["share_of_alone"]
    return (
        f"| {row['shape']} | {bound} | {p50[0]:.2f} | {p99[0]:.2f} ± {p99[1]:.2f} | {row['gap_max_s']:.2f} | "
        f"{row['attainment']:.1%} | {tokens[0]:.0f} ± {tokens[1]:.0f} | {share[0]:.0%} |"
    )


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the frontier: a line for each shape, from no bound to the tightest."""
    ratios = [row["tpot_p99_ratio"][0] for row in rows]
    frame = PlotFrame(
        Scale(1.0, max(ratios) * 1.1, is_log=True),
        from_zero([row["share_of_alone"][0] for row in rows]),
        "p99 of TPOT by that of chat alone",
        "documents' tokens by those of documents alone",
        width=620,
        height=360,
    )
    parts = [frame.axes(y_is_share=True)]
    for style, name in enumerate(dict.fromkeys(row["shape"] for row in rows)):
        placed = [
            (frame.at(row["tpot_p99_ratio"][0], row["share_of_alone"][0]), row) for row in rows if row["shape"] == name
        ]
        line = element("path", d=path([at for at, _ in placed]), fill="none", stroke="currentColor", stroke_width=2)
        marks = [mark(style, *at, f"{name}, bound {row['bound'] or 'none'}") for at, row in placed]
        words = [
            text("none" if row["bound"] is None else f"{row['bound']:g}", x=at[0] + 6, y=at[1] - 6)
            for at, row in placed
        ]
        legend = text(name, x=470, y=230 + 18 * style, font_weight="bold")
        colour = _COLOURS[style]
        parts.append(element("g", line, *marks, *words, legend, color=colour, fill=colour))
    frame_style = "text{font:12px sans-serif}.grid{stroke:#ddd}.axis{stroke:#888}.name{font-weight:bold}"
    background = element("rect", width="100%", height="100%", fill="#fff")
    return element(
        "svg",
        element("style", frame_style),
        background,
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox="0 0 620 360",
        role="img",
        aria_label="documents against interference",
    )


def _at(measure: Measure | None, percent: int) -> float:
    return measure.curve[percent] if measure is not None else 0.0


def _interval(values: Sequence[float]) -> tuple[float, float]:
    mean, half = interval(values)
    return mean, half or 0.0


def main() -> None:
    """Measure, print and record; rows of shapes that are not measured stay."""
    parser = parser_of(__doc__, name="scheduling/interference")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--duration", type=float, default=1500.0)
    arguments = parser.parse_args()
    for name in arguments.shapes:
        rows = measure(name, range(1, arguments.seeds + 1), arguments.duration)
        kept = [row for row in read_figures(arguments.name) or [] if row["shape"] != name]
        everything = sorted([*kept, *rows], key=lambda row: list(SHAPES).index(row["shape"]))
        write_result(arguments.name, everything)
        if arguments.name == parser.get_default("name"):
            PICTURE.write_text(draw(everything) + "\n")


if __name__ == "__main__":
    main()
