"""What mechanisms of other papers are worth to `aligned_slo`: without, with, and in their paper's own policy.

    ALIGNEDSERVE_DATA=FOLDER python -m experiments.ablations [--quick] [--processes 2] [--parts alise ...]

In steady state: ten minutes of the paper's load at a rate that is served. docs/experiments/ablations.md has the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from experiments.alise import AliseLoad
from experiments.apt_serve import AptServeLoad
from experiments.bros import WHOLE, BrosLoad
from experiments.common import (
    STEADY_FIGURES,
    LabelledCase,
    Row,
    chosen,
    over_seeds,
    pick,
    print_table,
    read_options,
    run,
    with_recorded,
    write_record,
)
from experiments.steady import LEAST_S, LEAST_SEEDS

UNION = "aligned_slo"
MODEL, LENGTHS = "opt-13b", "sharegpt"
RATES: Mapping[str, float] = {"alise": 1.1, "apt_serve": 3.2, "bros": 10.0}

COLUMNS: Mapping[str, str] = {
    "part": "load of",
    "system": "system",
    "rate": "requests/s",
    "all.normalized_s.mean": "s/token",
    "all.end_to_end_s.p99": "p99 response, s",
    "all.p99_attainment": "held",
    "rt.attainment": "held, real time",
    "be.loaded_tokens_per_s": "best-effort tokens/s",
    "all.loaded_tokens_per_s": "tokens/s",
    "all.longest_gap_s": "longest gap, s",
    "num_recomputed_tokens": "recomputed",
    "num_evictions": "evictions",
    "all.completed_of_arrived": "completed of sent",
}
_MORE = ("policy", "seed", "num_preemptions", "duration_s", "utilisation", "all.num_sent", "workload", "code")
_RECORDED = tuple(dict.fromkeys((*COLUMNS, *_MORE, *STEADY_FIGURES)))


@dataclass(frozen=True, slots=True)
class Ablated:
    """A system on a paper's load: one of that paper's experiment, or the union with a mechanism of the paper."""

    paper: str
    name: str
    system: str = UNION  # of the paper's experiment
    swap_format: str | None = None  # of the workers

    def case(self, seed: int, duration_s: float) -> LabelledCase:
        """Return the case."""
        made = self._of_paper(seed, duration_s)
        labels: dict[str, str | float] = {"part": self.paper, "system": self.name, "rate": RATES[self.paper]}
        policy = made.case.config.cluster.scheduling.policy
        labels |= {"policy": policy, "seed": seed}
        return LabelledCase(labels, replace(made.case, name=f"{self.paper} {self.name} {seed}", config=self._set(made)))

    def _of_paper(self, seed: int, duration_s: float) -> LabelledCase:
        rate = RATES[self.paper]
        if self.paper == "alise":
            return AliseLoad(MODEL, LENGTHS, rate, duration_s).case(self.paper, self.system, seed)
        if self.paper == "apt_serve":
            return AptServeLoad(LENGTHS, rate, 0, model=MODEL, sent_s=duration_s).case(self.paper, self.system, seed)
        return BrosLoad(MODEL, rate, LENGTHS).case(self.paper, self.system, seed, duration_s)

    def _set(self, made: LabelledCase) -> Any:
        """Return the configuration with the mechanism, which the simulated engine then has."""
        config, changed = made.case.config, msgspec.structs.replace
        if self.swap_format is None:
            return config
        decode = changed(config.cluster.decode, swap_format=self.swap_format)
        return replace(config, cluster=changed(config.cluster, decode=decode))


SYSTEMS = (
    Ablated("alise", UNION),
    Ablated("alise", f"{UNION}, int8 swaps", swap_format="int8"),
    Ablated("alise", "ALISE", "ALISE"),
    Ablated("alise", "ALISE, recomputing", "Recompute"),
    Ablated("apt_serve", UNION),
    Ablated("apt_serve", "Apt-Serve", "apt_serve"),
    Ablated("apt_serve", "Apt-Serve, keys and values", "apt_serve, keys and values"),
    Ablated("bros", UNION),
    Ablated("bros", "BROS", "bros"),
    Ablated("bros", "BROS, whole caches", WHOLE),
)


def show(rows: Sequence[Row]) -> None:
    """Print a table for each load."""
    for part in dict.fromkeys(row["part"] for row in rows):
        means = over_seeds(pick(rows, part=part), ("part", "system", "rate"))
        print_table(means, {**COLUMNS, "num_runs": "runs"}, title=part)


def parts_of(*, is_quick: bool) -> list[list[LabelledCase]]:
    """Return the experiment, seed by seed and load by load; or some seconds of each."""
    if is_quick:
        return [[one.case(1, 20.0) for one in SYSTEMS]]
    return [
        [one.case(seed, LEAST_S) for one in SYSTEMS if one.paper == paper]
        for seed in range(1, LEAST_SEEDS + 1)
        for paper in RATES
    ]


def main() -> None:
    """Simulate, show, record; what is done is recorded after every part."""
    options = read_options(__doc__)
    rows = with_recorded("ablations", [], options) if options.is_recorded else []
    for cases in parts_of(is_quick=options.is_quick):
        rows += chosen(run(options.select(cases), processes=options.processes), _RECORDED)
        if options.is_recorded:
            write_record("ablations", {"runs": rows})
    show(rows)


if __name__ == "__main__":
    main()
