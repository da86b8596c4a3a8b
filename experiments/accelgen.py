"""AccelGen's evaluation (section 6): Figure 11 against its baselines and the oracle, Figure 12 without each method.

    python -m experiments.accelgen [--quick] [--processes 2] [--policies NAME ...]

One worker, a window of simulated time at 8 requests/s as in the paper, and lower rates. docs/experiments/accelgen.md
has the paper's numbers beside ours. Lengths come from the folder that ALIGNEDSERVE_DATA names, or stand-ins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from experiments.common import (
    GIB,
    STEADY_FIGURES,
    ColocatedWorkerSpec,
    LabelledCase,
    Labels,
    Row,
    chosen,
    colocated_case,
    line,
    over_seeds,
    print_table,
    read_options,
    run,
    source_or,
    with_recorded,
    write_record,
)
from experiments.ttft_objectives import with_ttft_from_prefill
from lab.costmodel.choice import WorkerSpec
from lab.sim.config import SimConfig
from lab.workload.distributions import parse_distribution

TTFT_SCALE = parse_distribution("uniform(0.5,1.5)")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "orca": {"reserved_len": 8192},  # section 3.1, as are the budgets of `_settings`
    "apt_serve": {"hybrid_cache": False},
}
BASELINES = ("fcfs", "orca", "fastserve", "fastgen", "sarathi")
POLICIES = (*BASELINES, "accelgen", "oracle", "aligned_slo", "apt_serve")
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "/Order": {"prioritisation": False},
    "/Chunk": {"dynamic_chunking": False},
    "/Chunk, whole": {"dynamic_chunking": False, "static_chunk_len": 1 << 20},
    "/Batch": {"multi_resource": False},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on its accelerators with the paper's cache, and the window that is simulated."""

    model: str = "opt-13b"
    tensor_parallel: int = 1
    cache_gib: float = 12.0
    pivot_len: int = 768  # S_pf
    source: str = "roofline"
    rate: float = 8.0  # requests/s
    window_s: float = 100.0  # nothing is sent or simulated beyond
    predict: str = "error(0.5)"
    block_size: int = 32


OPT_13B = Setting()
MODELS = (
    OPT_13B,
    Setting("llama-2-13b", window_s=50.0),
    Setting("opt-175b", 8, 8 * 33.75, 1280, window_s=50.0),
    Setting("llama-3-70b", 4, 135.0, 1280, window_s=50.0),
)
RATES = (0.15, 0.5)
FEWER = ("sarathi", "accelgen", "oracle", "aligned_slo")  # where all would take long


def workload_line(setting: Setting) -> str:
    """Return Alpaca, ShareGPT and books in the shape of the paper's Figure 8a; a fifth of all offline, with a deadline.

    Books are drawn: BookCorpus has no lengths to be had. 2 048 tokens at most are generated (section 3.1).
    """
    common = f"max_tokens=2048, predict={setting.predict}"
    online = f"tpot=uniform(0.140625,0.234375), {common}"
    book = "prompt=mix(0.6: uniform(513,4095), 0.4: uniform(4096,6144)), output=uniform(512,2048)"
    alpaca = source_or("alpaca", "prompt=lognormal(16,44), output=lognormal(46,179)")
    sharegpt = source_or("sharegpt_full", "sharegpt")
    shares = {
        f"alpaca: {alpaca}, max_prompt=500, {online}": 0.33,
        f"sharegpt: {sharegpt}, max_prompt=2048, {online}": 0.32,
        f"book: {book}, {online}": 0.15,
        f"offline: {book}, class=be, deadline=uniform(60,240), {common}": 0.20,
    }
    return "; ".join(f"{traffic}, rate={setting.rate * share:.6g}" for traffic, share in shares.items())


def accelgen_case(
    setting: Setting, policy: str, seed: int, labels: Labels, settings: Mapping[str, Any] | None = None
) -> LabelledCase:
    """Return the case of one window. The settings of the policy are the paper's, with these changed."""
    spec = WorkerSpec(setting.model, tensor_parallel=setting.tensor_parallel)
    # vLLM: not below the longest prompt.
    worker = ColocatedWorkerSpec(spec, source=setting.source, max_tokens=8192, context_len=8192)
    written = line(workload_line(setting), seed, duration_s=setting.window_s)
    known: Labels = {"model": setting.model, "source": setting.source, "rate": setting.rate, **labels}
    labelled = colocated_case(known, policy, worker, written, {**_settings(policy, setting), **(settings or {})})
    config = _with_cache(labelled.case.config, setting)
    workload = with_ttft_from_prefill(
        written.build(), lambda length: prefill_s(config.decode_costs, length), scale=TTFT_SCALE, seed=seed
    )
    return labelled._replace(case=replace(labelled.case, config=config, workload=workload))


def _settings(policy: str, setting: Setting) -> dict[str, Any]:
    budgets = {"accelgen": "pivot_len", "fastgen": "token_budget", "sarathi": "token_budget"}
    budget = {budgets[policy]: setting.pivot_len} if policy in budgets else {}
    return {**SETTINGS.get(policy, {}), **budget}


def _with_cache(config: SimConfig, setting: Setting) -> SimConfig:
    change = msgspec.structs.replace
    cluster = config.cluster
    decode = change(cluster.decode, kv_cache_bytes=int(setting.cache_gib * GIB))
    engine = change(cluster.engine, block_size=setting.block_size)
    layout = replace(config.layout, block_size=setting.block_size)
    return replace(
        config, cluster=change(cluster, decode=decode, engine=engine), layout=layout, duration_s=setting.window_s
    )


def prefill_s(costs: CostModel, prompt_len: int) -> float:
    work = IterationWork()
    work.add_chunk(prompt_len, 0, is_last=True)
    return costs.iteration_s(work)


# --- what is run


def _headline(seeds: Sequence[int], models: Iterable[Setting], policies: Sequence[str]) -> list[LabelledCase]:
    return [
        accelgen_case(setting, policy, seed, {"figure": "11"})
        for setting in models
        for policy in policies
        for seed in seeds
    ]


def _ablations(seeds: Sequence[int], setting: Setting) -> list[LabelledCase]:
    return [
        accelgen_case(setting, "accelgen", seed, {"figure": "12", "policy": name}, settings)
        for name, settings in ABLATIONS.items()
        for seed in seeds
    ]


def _rates(setting: Setting) -> list[LabelledCase]:
    return [
        accelgen_case(replace(setting, rate=rate, window_s=2 * setting.window_s), policy, 1, {"figure": "rates"})
        for rate in RATES
        for policy in FEWER
    ]


def _reasons(setting: Setting) -> list[LabelledCase]:
    setting = replace(setting, window_s=setting.window_s / 2)
    changes = {
        "half the window": setting,
        "cache x2": replace(setting, cache_gib=24.0),
        "cache x4": replace(setting, cache_gib=48.0),
        "vllm times": replace(setting, source="vllm"),
        "distserve times": replace(setting, source="distserve"),
    }
    only: dict[str, tuple[Setting, dict[str, Any]]] = {
        "exact lengths": (replace(setting, predict="exact"), {}),
        "no preemption": (setting, {"max_preemptions": 0, "starvation_s": 1e9}),
    }
    compared = ("sarathi", "accelgen", "aligned_slo")
    cases = [
        accelgen_case(changed, policy, 1, {"figure": "why", "what": what})
        for what, changed in changes.items()
        for policy in compared
    ]
    return cases + [
        accelgen_case(changed, "accelgen", 1, {"figure": "why", "what": what}, settings)
        for what, (changed, settings) in only.items()
    ]


# --- what is shown

BY = ("figure", "model", "source", "rate", "policy", "what")
COLUMNS = {
    "policy": "policy",
    "model": "model",
    "rate": "requests/s sent",
    "what": "changed",
    "all.tokens_per_s": "tokens/s",
    "all.requests_per_s": "requests/s",
    "all.goodput_per_s": "goodput, requests/s",
    "all.timely_tokens_per_s": "timely tokens/s",
    "all.token_attainment": "iteration SLOs held",
    "all.attainment": "requests held",
    "offline.attainment": "deadlines held",
    "all.end_to_end_s.mean": "JCT, s",
    "forward_len": "tokens/iteration",
    "iteration_s": "s/iteration",
    "num_evictions": "evictions",
}
RECORDED = (
    *BY,
    "code",
    "num_runs",
    *COLUMNS,
    *(f"{name}.spread" for name in COLUMNS),
    "mean_blocks",
    "num_iterations",
    *STEADY_FIGURES,
)


def _with_means(row: Row) -> Row:
    iterations = max(row["num_iterations"], 1)
    return {
        "what": "",
        **row,
        "forward_len": (row["num_prompt_tokens"] + row["num_decodes"]) / iterations,
        "iteration_s": row["duration_s"] * row["utilisation"] / iterations,
    }


def cases_of(*, is_quick: bool, setting: Setting = OPT_13B) -> list[LabelledCase]:
    if is_quick:
        short = replace(setting, window_s=min(setting.window_s, 20.0))
        return _headline((1,), (short,), ("sarathi", "accelgen", "aligned_slo")) + _ablations((1,), short)
    seeds = (1, 2, 3)
    return [
        *_headline(seeds, (setting,), POLICIES),
        *_ablations(seeds, setting),
        *_headline(seeds[:1], MODELS[1:], ("fcfs", *FEWER)),
        *_rates(setting),
        *_reasons(setting),
    ]


def figures(cases: Sequence[LabelledCase], *, processes: int) -> list[Row]:
    """Return one row for each configuration: means over its seeds."""
    return over_seeds(map(_with_means, run(cases, processes=processes)), by=BY)


def main() -> None:
    """Run, print, record."""
    options = read_options(__doc__)
    rows = figures(options.select(cases_of(is_quick=options.is_quick)), processes=options.processes)
    if options.is_recorded:
        rows = with_recorded("accelgen", chosen(rows, dict.fromkeys(RECORDED)), options)
    for figure in dict.fromkeys(row["figure"] for row in rows):
        print_table([row for row in rows if row["figure"] == figure], COLUMNS, title=figure)
    if options.is_recorded:
        configurations = [msgspec.to_builtins(setting) | {"line": workload_line(setting)} for setting in MODELS]
        write_record("accelgen", {"configurations": configurations, "runs": rows})


if __name__ == "__main__":
    main()
