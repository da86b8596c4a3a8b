"""Chat beside a deep backlog of documents on one GPU, simulated: the load that benchmarks.gpu.chat_beside_documents has
run live, request by request, beside what came of it there.

    python -m benchmarks.gpu.promise_simulated        # about two minutes of one core

By the data sheet (`roofline`, `calibrated`), and by costs fitted to iterations of that GPU (benchmarks.gpu.predicted).
Phases and windows are those of the live run. What comes within a window is the difference of two runs that are cut off
where it begins and ends. Writes the record, and prints it as a table.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.sections import ClusterConfig, DecodeWorkerConfig, SchedulingConfig, Topology
from alignedserve.config.sections.model import ModelSectionConfig
from alignedserve.core.request import RequestClass, Slo
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from benchmarks.gpu.predicted import SERVED_SHAPE, fitted_profile
from benchmarks.gpu.timed_iterations import figures_of
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import RESULTS, write_result
from lab.costmodel.choice import WorkerSpec
from lab.sim.config import SimConfig
from lab.sim.engine import IterationLine
from lab.sim.policies import ClusterHardware, simulated_policy, with_policy
from lab.sim.records import RequestRecord
from lab.sim.simulation import BEGIN_S, Simulation
from lab.workload.requests import ClosedLoop, TimedRequest, Workload, WorkloadDescription

NAME = "gpu/promise_simulated"
CHAT, DOCUMENTS, BOTH = "chat alone", "documents alone", "chat beside documents"
FITTED = "fitted"
BETWEEN = "fitted, and between"  # and the time between iterations as the live run had it, which no policy learns
SOURCES = ("roofline", "calibrated", FITTED, BETWEEN)
LIVE = ("live", "live, again")

_CHAT_CLASS, _DOCUMENT_CLASS = "chat", "documents"
_PLACES = 1 << 16  # where a prompt may begin in the tokens that Traffic takes prompts from
_POLICY = "aligned_slo"


class Phase(NamedTuple):
    """A phase of the live run: a window of simulated time, and the seconds after it until its chats have ended."""

    name: str
    begins_s: float
    ends_s: float
    tail_s: float


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A recorded live run: its load, and what one policy made of it."""

    load: dict[str, Any]
    found: dict[str, Any]  # of the policy: sizes, and figures of each phase

    @property
    def documents_alone_s(self) -> float:
        """Return the seconds of documents before chat joins them."""
        return float(self.found["phases"][DOCUMENTS]["seconds"])

    def between_s(self, phase: str) -> float:
        """Return what passed between two iterations of a phase in the mean: messages, decisions, the next batch."""
        iterations = self.found["phases"][phase]["iterations"]
        return float(iterations["share_turnaround"] / iterations["per_s"])

    def phases(self) -> list[Phase]:
        """Return the phases, in time of their simulations: chat alone has one of its own."""
        seconds = {name: figures["seconds"] for name, figures in self.found["phases"].items()}
        lead_s, fill_s, tail_s = (self.load[name] for name in ("lead_s", "fill_s", "tail_s"))
        joins_s = seconds[DOCUMENTS]
        return [
            Phase(CHAT, lead_s, seconds[CHAT], tail_s),
            Phase(DOCUMENTS, fill_s, joins_s, 0.0),
            Phase(BOTH, joins_s + lead_s, joins_s + seconds[BOTH], tail_s),
        ]


class DrawnDocuments:
    """Documents by number, drawn as Traffic draws them."""

    def __init__(self, load: dict[str, Any]) -> None:
        self._load = load
        self._lengths = random.Random(1)
        self._drawn: list[TimedRequest] = []

    def __getitem__(self, number: int) -> TimedRequest:
        """See RequestSource."""
        while len(self._drawn) <= number:
            prompt_len, answer_len = _drawn(
                self._lengths, self._load["document_prompts"], self._load["document_answers"]
            )
            own = (0.0, prompt_len, answer_len, answer_len, _DOCUMENT_CLASS, RequestClass.BEST_EFFORT)
            self._drawn.append(TimedRequest(*own))
        return self._drawn[number]


def drawn_chats(load: dict[str, Any], begins_s: float, ends_s: float) -> tuple[TimedRequest, ...]:
    """Return the chats of a phase, drawn as Traffic draws them: the same in every phase."""
    lengths, due_s, chats = random.Random(2), begins_s, []
    slo = Slo(ttft_s=load["ttft_s"], tpot_s=load["tpot_s"])
    while (due_s := due_s + lengths.expovariate(load["chats_per_s"])) < ends_s:
        prompt_len, answer_len = _drawn(lengths, load["chat_prompts"], load["chat_answers"])
        chats.append(TimedRequest(due_s, prompt_len, answer_len, answer_len, _CHAT_CLASS, slo=slo))
    return tuple(chats)


def _drawn(lengths: random.Random, prompts: Sequence[int], answers: Sequence[int]) -> tuple[int, int]:
    lengths.randrange(_PLACES)
    return lengths.randint(*prompts), lengths.randint(*answers)


def simulated_worker(live: LiveRun, source: str, *, stops: bool = False) -> SimConfig:
    """Configure the worker of the live run, with costs of this source. `stops`: its passes stop between layers."""
    token_bytes = SERVED_SHAPE.kv_token_bytes
    cache_bytes = live.found["cache_tokens"] * token_bytes
    decode = DecodeWorkerConfig(
        count=1,
        kv_cache_bytes=cache_bytes,
        swap_space_bytes=cache_bytes // 2,  # what `serve` takes where the host has it
        max_running_requests=live.found["max_running_requests"],
        max_num_batched_tokens=live.found["max_num_batched_tokens"],
    )
    cluster = ClusterConfig(
        topology=Topology.ELASTIC,
        model=ModelSectionConfig(max_context_len=live.load["max_context_len"]),
        scheduling=SchedulingConfig(policy=_POLICY, yield_between_layers=stops or None),
        decode=decode,
    )
    chosen = with_policy(cluster, _POLICY, topology=Topology.ELASTIC)
    if source in (FITTED, BETWEEN):
        config = simulated_policy(fitted_profile(RESULTS / "gpu"), chosen)
    else:
        config = simulated_policy(ClusterHardware(WorkerSpec(SERVED_SHAPE, "h100"), source=source), chosen)
    # A data sheet's memory is not what the worker had.
    own = msgspec.structs.replace(config.cluster.decode, kv_cache_bytes=cache_bytes)
    return replace(config, cluster=msgspec.structs.replace(config.cluster, decode=own))


def simulate(live: LiveRun, source: str, *, stops: bool = False) -> dict[str, Any]:
    """Return the figures of each phase."""
    config = simulated_worker(live, source, stops=stops)
    joins_s = live.documents_alone_s
    found = {}
    for phase in live.phases():
        if source == BETWEEN:
            config = _with_pauses(config, live.between_s(phase.name))
        chats = drawn_chats(live.load, 0.0 if phase.name == CHAT else joins_s, phase.ends_s)
        end_s = phase.ends_s + phase.tail_s
        loop = ClosedLoop(_DOCUMENT_CLASS, live.load["num_documents"], is_wave=False, stream=DrawnDocuments(live.load))
        workload = Workload(
            WorkloadDescription(phase.name, 0),
            () if phase.name == DOCUMENTS else chats,
            () if phase.name == CHAT else (loop,),
            ends_s=end_s,
        )
        found[phase.name] = _figures(config, workload, phase, live.load)
    return found


def _with_pauses(config: SimConfig, seconds: float) -> SimConfig:
    """Return the configuration with as many seconds before every iteration, which the worker does not measure."""
    coefficients = fitted_profile(RESULTS / "gpu").coefficients
    slower = replace(coefficients, base_s=coefficients.base_s + seconds)
    return replace(
        config,
        decode_costs=LinearIterationModel(slower, config.decode_costs.swap_s(1.0)),
        unmeasured_costs=LinearIterationModel(LinearCoefficients(base_s=seconds)),
    )


class _Cut(NamedTuple):
    """A simulation that was cut off."""

    records: Sequence[RequestRecord]
    timeline: Sequence[IterationLine]

    def num_tokens(self, class_name: str) -> int:
        """Return the tokens of answers so far."""
        return sum(one.num_tokens for one in self.records if one.class_name == class_name)


def _run(config: SimConfig, workload: Workload, end_s: float) -> _Cut:
    simulation = Simulation(replace(config, duration_s=end_s, timeline_of=config.decode_name(0)), workload)
    result = simulation.run()
    return _Cut(simulation.records(), result.timeline)


def _figures(config: SimConfig, workload: Workload, phase: Phase, load: dict[str, Any]) -> dict[str, Any]:
    begins_s, ends_s = phase.begins_s, phase.ends_s
    seconds = ends_s - begins_s
    first, last = (_run(config, workload, at_s) for at_s in (begins_s, ends_s))
    lines = [one for one in last.timeline if begins_s <= one.started_s - BEGIN_S < ends_s]
    figures: dict[str, Any] = {
        "iterations_per_s": len(lines) / seconds,
        "iteration_ms_p50": statistics.median(one.ended_s - one.started_s for one in lines) * 1e3,
        "decodes": statistics.mean(one.num_decodes for one in lines),
    }
    if phase.name != DOCUMENTS:
        ended = _run(config, workload, ends_s + phase.tail_s)
        chats = [one for one in ended.records if one.class_name == _CHAT_CLASS]
        figures |= _chat_figures([one for one in chats if begins_s <= one.arrival_s - BEGIN_S < ends_s], load)
    if phase.name != CHAT:
        prompts = [
            one.prompt_len
            for one in last.records
            if one.class_name == _DOCUMENT_CLASS
            and one.ttft_s is not None
            and begins_s <= one.arrival_s + one.ttft_s - BEGIN_S < ends_s
        ]
        figures["prompt_tokens_per_s"] = sum(prompts) / seconds
        outputs = last.num_tokens(_DOCUMENT_CLASS) - first.num_tokens(_DOCUMENT_CLASS)
        figures["output_tokens_per_s"] = outputs / seconds
    return figures


def _chat_figures(chats: Sequence[RequestRecord], load: dict[str, Any]) -> dict[str, Any]:
    ttfts = sorted(one.ttft_s if one.ttft_s is not None else float("inf") for one in chats)
    gaps = sorted(one.max_tbt_s if one.max_tbt_s is not None else float("inf") for one in chats)
    tpots = sorted(one.tpot_s if one.tpot_s is not None else float("inf") for one in chats)
    return {
        "chats": len(chats),
        "held": statistics.mean(one.has_met_slo for one in chats),
        "ttft_ms_p50": _at(ttfts, 50),
        "ttft_ms_p99": _at(ttfts, 99),
        "tpot_ms_p50": _at(tpots, 50),
        "longest_gap_ms_p50": _at(gaps, 50),
        "longest_gap_ms_p99": _at(gaps, 99),
    }


def _at(ascending: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds: the least value with so many at or below it, as of the live run."""
    return 1e3 * ascending[max(-(-percent * len(ascending) // 100), 1) - 1]


def live_figures(live: LiveRun) -> dict[str, Any]:
    """Return the same figures of a live run."""
    found = {}
    for phase in live.phases():
        own = live.found["phases"][phase.name]
        iterations = own["iterations"]
        figures: dict[str, Any] = {
            "iterations_per_s": iterations["per_s"],
            "iteration_ms_p50": iterations["ms"]["p50"],
            "decodes": iterations["mean_batch"],
            "share_turnaround": iterations["share_turnaround"],
        }
        if chat := own.get("chat"):
            figures |= {"chats": chat["num"], "held": chat["held"]}
            figures |= {f"ttft_ms_{at}": 1e3 * chat["ttft_s"][at] for at in ("p50", "p99")}
            figures["tpot_ms_p50"] = 1e3 * chat["tpot_s"]["p50"]
        if documents := own.get("documents"):
            figures |= {name: documents[name] for name in ("prompt_tokens_per_s", "output_tokens_per_s")}
        found[phase.name] = figures
    return found


def live_runs(folder: Path) -> list[LiveRun]:
    """Return the recorded ones, the longer one first."""
    both = [figures_of(folder, name) for name in ("promise", "full-sizes")]
    return [LiveRun(figures["load"], figures["policies"][_POLICY]) for figures in both]


# --- the table

_ROWS = (
    (CHAT, "held", "chats held", "{:.0%}"),
    (CHAT, "ttft_ms_p50", "TTFT p50, ms", "{:.0f}"),
    (CHAT, "ttft_ms_p99", "TTFT p99, ms", "{:.0f}"),
    (CHAT, "tpot_ms_p50", "TPOT p50, ms", "{:.1f}"),
    (CHAT, "iterations_per_s", "iterations/s", "{:.0f}"),
    (DOCUMENTS, "prompt_tokens_per_s", "prompt tokens/s", "{:,.0f}"),
    (DOCUMENTS, "output_tokens_per_s", "output tokens/s", "{:,.0f}"),
    (DOCUMENTS, "iterations_per_s", "iterations/s", "{:.1f}"),
    (BOTH, "held", "chats held", "{:.0%}"),
    (BOTH, "ttft_ms_p50", "TTFT p50, ms", "{:.0f}"),
    (BOTH, "ttft_ms_p99", "TTFT p99, ms", "{:.0f}"),
    (BOTH, "tpot_ms_p50", "TPOT p50, ms", "{:.1f}"),
    (BOTH, "prompt_tokens_per_s", "documents' prompt tokens/s", "{:,.0f}"),
    (BOTH, "output_tokens_per_s", "documents' output tokens/s", "{:,.0f}"),
    (BOTH, "iterations_per_s", "iterations/s", "{:.1f}"),
)


def table(figures: dict[str, Any]) -> str:
    """Return it: a row for each figure, a column for each run."""
    columns = (*LIVE, *SOURCES)
    head = f"| phase | | {' | '.join((*LIVE, *(f'`{source}`' for source in SOURCES)))} |\n"
    lines = [head, "|---" * (2 + len(columns)) + "|\n"]
    before = ""
    for phase, key, what, spelling in _ROWS:
        cells = [
            spelling.format(figures[column][phase][key]).replace("%", " %").replace(",", " ") for column in columns
        ]
        lines.append(f"| {phase if phase != before else ''} | {what} | {' | '.join(cells)} |\n")
        before = phase
    return "".join(lines)


def main() -> None:
    """Simulate, write the record, and print it as a table."""
    parser_of(__doc__).parse_args()
    runs = live_runs(RESULTS / "gpu")
    figures = {name: live_figures(run) for name, run in zip(LIVE, runs, strict=True)}
    figures |= {source: simulate(runs[0], source) for source in SOURCES}
    write_result(NAME, figures)
    print(table(figures))


if __name__ == "__main__":
    main()
