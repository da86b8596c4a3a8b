"""Confidence in a plan: the sample that the workload is, and the simulator's own error."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alignedserve.core.metrics import in_percent
from alignedserve.costmodel.roofline import CALIBRATIONS
from lab.planning.candidates import Candidate
from lab.planning.hardware_list import RECORDED
from lab.planning.trials import Machines, Outcome
from lab.planning.windows import Group
from lab.sim.result import PartResult

# By how much simulated runs differ from live ones that they were not fitted to, as the ratio of simulated to real. From
# benchmarks/results/simulation/simulated_vs_live_*.json: pocket model, 125M OPT and SmolLM2, colocated and elastic, two
# cores.
MEASURED_ON = "2026-11-22"
THROUGHPUT_RATIOS = (0.81, 1.05)
TTFT_RATIOS = (0.89, 1.18)  # medians and 90th percentiles of all requests
TPOT_RATIOS = (0.79, 1.24)
SLOWDOWNS = (1.1, 1.35)  # of iterations, with which a plan is tried: the usual error of TPOT, and more than the largest
_NUM_DRAWS = 2000
_PERCENTS = (5.0, 95.0)
_RULE_OF_THREE = 3.0  # if none of n requests misses, at most this many of a later n do, with 95 % confidence


class Interval(NamedTuple):
    """Bounds of a share, with 90 % confidence."""

    low: float
    high: float


def attained_interval(parts: Sequence[PartResult], seed: int) -> Interval:
    """Return the interval of the share that meets its objectives, for other traffic of this kind.

    A bootstrap over the parts of the run, not over single requests, as those of one moment are late together.
    """
    counts = np.array([(part.num_sent, part.num_met) for part in parts if part.num_sent], np.int64)
    if not len(counts):
        return Interval(0.0, 1.0)
    drawn = np.random.default_rng(seed).integers(0, len(counts), (_NUM_DRAWS, len(counts)))
    sent, met = counts[drawn, 0].sum(axis=1), counts[drawn, 1].sum(axis=1)
    low, high = np.percentile(met / sent, _PERCENTS).tolist()
    most = max(1.0 - _RULE_OF_THREE / int(counts[:, 0].sum()), 0.0)  # a bootstrap of none missed would promise all
    return Interval(min(low, most), high)


def compared(groups: Sequence[Group], span_s: float, on_windows: Outcome | None, on_whole: Outcome) -> list[str]:
    """Say what was simulated: the whole workload, or windows of it, and how well the windows predicted it."""
    if not groups:
        return ["Every plan was simulated on the whole workload; hopeless ones were abandoned."]
    windows = [group.window for group in groups]
    played_s = sum(window.end_s - window.start_s for window in windows)
    sentences = [
        f"The plan was simulated on the whole workload, its equals and those beside it on up to {len(groups)} windows "
        f"({played_s:.0f} of {span_s:.0f} s): the busiest one, and one of each group of "
        f"{', '.join(str(group.num_windows) for group in groups[1:])} by load. A family of plans that looks worse on "
        "them than it is can be overlooked."
    ]
    if on_windows is not None and on_windows.windows is not None:
        sentences.append(
            f"On the {on_windows.windows.num_played} of these windows that it needed the plan attains "
            f"{in_percent(on_windows.attained, 2)}, on the whole {in_percent(on_whole.attained, 2)}."
        )
    return sentences


def cautions(num_requests: int, share: float, span_s: float, costs: str) -> list[str]:
    """Return what limits the confidence, in words. `costs`: a caution about the costs, or nothing."""
    sentences = []
    num_allowed = num_requests * (1.0 - share)
    if num_allowed < 10:
        enough = f"; {round(10 / (1.0 - share)):,} would be enough" if share < 1.0 else ""
        sentences.append(
            f"{num_requests:,} requests with objectives are few to tell {100.0 * share:.6g} % of them: "
            f"{num_allowed:.1f} may miss{enough}."
        )
    if span_s < 600.0:
        sentences.append(f"The workload is {span_s:.0f} s long: its busiest hour, say, cannot be in it.")
    if costs:
        sentences.append(costs)
    sentences.append(
        f"Simulated by real, on live runs that it was not fitted to ({MEASURED_ON}, two cores): throughput "
        f"{THROUGHPUT_RATIOS[0]:.2f} to {THROUGHPUT_RATIOS[1]:.2f}, TTFT {TTFT_RATIOS[0]:.2f} to {TTFT_RATIOS[1]:.2f}, "
        f"TPOT {TPOT_RATIOS[0]:.2f} to {TPOT_RATIOS[1]:.2f} (benchmarks/results/simulation/simulated_vs_live_*.json)."
    )
    return sentences


def straggler_words(outcome: Outcome, machines: Machines) -> str:
    """Return which share of decode attention stragglers cost in what was simulated, and why."""
    kernel = "as measured" if machines.model is None else f"kernel {machines.kernel.value}"
    if outcome.result is None:
        return kernel
    share = in_percent(outcome.result.iteration_log.straggler_share)
    return f"{share} of decode attention is assumed for stragglers, {kernel}"


def caution_of_costs(candidate: Candidate, machines: Machines) -> str:
    """Return a caution about the costs of a plan's workers; empty where they are known well."""
    offer, num_workers = candidate.offer, candidate.num_accelerators
    if not offer.is_profiled:
        calculated = (
            "Times of iterations are calculated from datasheets (docs/costmodels.md compares with measurements), not "
            "measured on this hardware; `alignedserve profile` measures them."
        )
        return calculated if machines.costs in ("roofline", *CALIBRATIONS) else ""
    if offer.name == RECORDED or num_workers == 1:
        return ""
    num_threads = machines.profiles[offer.name].num_threads
    cores = f"{num_workers * num_threads} cores ({num_threads} each)" if num_threads else "cores of their own"
    return f"Its {num_workers} workers are simulated as fast as the measured one: that needs {cores}."
