"""Table of docs/experiments/README.md: claims of the papers, and the same figures here."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from experiments.pages.record import RESULTS, Record, bullets, change, figures, runs, share

_STRAGGLER, _BALANCED = "one_block_per_sequence", "load_balanced"
_TOKENS, _TBT, _TPOT = "all.tokens_per_s", "all.tbt_s.p99", "all.tpot_s.p99"
_VLLM_AND_OTHERS = ("vllm", "distserve", "fastgen")


class Claim(NamedTuple):
    """A claim of a paper, the same of ours, and what that says."""

    paper: str
    claimed: str
    ours: str
    verdict: str


def _times(ours: Record, theirs: Sequence[Record], figure: str, *, is_less_better: bool = False) -> str:
    ratios = [ours.mean(figure) / one.mean(figure) for one in theirs]
    return ", ".join(f"{1 / ratio if is_less_better else ratio:.2f}" for ratio in ratios)


def _range(values: Sequence[float], shown: str = ".2f") -> str:
    return f"{min(values):{shown}} to {max(values):{shown}}"


# --- AlignedServe


def _alignedserve() -> list[Claim]:
    def of(part: str, system: str, **labels: object) -> Record:
        return runs("alignedserve").of(part=part, system=system, **labels)

    def compared(part: str, figure: str, *, is_less_better: bool = False, **labels: object) -> str:
        theirs = [of(part, name, **labels) for name in _VLLM_AND_OTHERS]
        return _times(of(part, "aligned", **labels), theirs, figure, is_less_better=is_less_better)

    points = [{"lengths": lengths, "kernel": _STRAGGLER} for lengths in ("sharegpt", "longbench", "azure")]
    recorded = {
        name: [
            of("figures 8, 10", "aligned", **at).mean(_TOKENS) / of("figures 8, 10", name, **at).mean(_TOKENS)
            for at in points
        ]
        for name in ("vllm", "distserve")
    }
    parts = [of("figure 14", name).mean(_TOKENS) for name in ("aligned", "aligned w/o P", "aligned w/o P&B")]
    one, balanced = (compared("headline", _TOKENS, kernel=kernel) for kernel in (_STRAGGLER, _BALANCED))
    gaps = compared("headline", _TBT, is_less_better=True, kernel=_STRAGGLER)
    means = compared("headline", _TPOT, is_less_better=True, kernel=_STRAGGLER)
    as_scheduled = [
        of("steady", name, seed=1).mean("all.loaded_tokens_per_s") for name in ("aligned", "vllm", "distserve")
    ]
    rates = ", ".join(f"{as_scheduled[0] / other:.2f}" for other in as_scheduled[1:])
    page = "[AlignedServe](alignedserve.md)"
    return [
        Claim(
            page,
            "tokens/s relative to vLLM, DistServe, FastGen: 1.32, 1.35, 1.85 times",
            f"{one} where every wave lasts as long as the longest context; {balanced} with a load-balanced kernel; "
            f"**{rates} relative to vLLM, DistServe in steady state with vLLM's kernel as a list schedule**",
            "**Not reproduced with OPT**, whose 32 to 40 key heads occupy the whole device; not simulated with fewer",
        ),
        Claim(
            page,
            "the same on eight accelerators",
            f"{compared('eight accelerators', _TOKENS)}; p99 TBT lower by "
            f"{compared('eight accelerators', _TBT, is_less_better=True)} times (waves as long as the longest)",
            "Reproduced with that kernel alone",
        ),
        Claim(
            page,
            "recordings (Figures 8, 10): more tokens/s than each",
            f"{_range(recorded['vllm'])} relative to vLLM, {_range(recorded['distserve'])} to DistServe (one block)",
            "**Not reproduced** against colocated workers",
        ),
        Claim(
            page,
            "p99 latency 1.74 to 3.05 times lower",
            f"p99 TBT {gaps} times; p99 of a request's mean gap {means}",
            "Reproduced for gaps, not for a request's mean against colocated workers",
        ),
        Claim(
            page,
            "without prefetching -14.7 % tokens/s, without batches by length a further -28.5 %",
            f"{change(parts[1] / parts[0])}, a further {change(parts[2] / parts[1])}",
            "Reproduced in order",
        ),
        Claim(page, "mixed lengths prolong an iteration (Figure 1)", _mixed_lengths(), "Seen with an undivided kernel"),
    ]


def _mixed_lengths() -> str:
    rows = json.loads((RESULTS.parent.parent / "benchmarks/results/gpu/gpu_kernels.json").read_text())["figures"][
        "rows"
    ]
    took = {(row["by"], row["case"]): row["microseconds"] for row in rows if row["kernel"] == "decode"}
    (mixed, equal), divided = (
        [took[kernel, case] for case in ("60 x 256 + 4 x 16384", "64 x 1264")] for kernel in ("undivided", "triton")
    )
    return (
        "decode attention of 60 x 256 + 4 x 16384 tokens on an H100 takes an undivided kernel "
        f"{mixed:.0f} us, 64 x 1264 {equal:.0f} us (**{mixed / equal:.2f} times**); a divided kernel "
        f"{divided[0]:.0f} and {divided[1]:.0f} us"
    )


# --- the others


def _bros() -> list[Claim]:
    at = {name: runs("bros").of(part="headline", policy=name) for name in ("bros", "fcfs", "round_robin")}
    latency, best_effort, ttft = "rt.normalized_s.mean", "be.loaded_requests_per_s", "rt.ttft_attainment"

    def against_both(figure: str) -> str:
        ours = at["bros"].mean(figure)
        return ", ".join(change(ours / at[name].mean(figure)) for name in ("fcfs", "round_robin"))

    over_all = [
        Record(figures("bros")["comparisons"]).of(lengths="sharegpt", policy="bros", baseline=name)
        for name in ("fcfs", "round_robin")
    ]
    means, works = ([f"{100 * one.mean(measure):+.1f} %" for one in over_all] for measure in ("latency", "be"))
    page = "[BROS](bros.md)"
    return [
        Claim(
            page,
            "normalised latency -74 % against vLLM, -54 % against round robin; best-effort throughput -11, -9 %",
            f"{against_both(latency)}; {against_both(best_effort)} at 10/s on OPT-13B "
            f"(all points: {', '.join(means)}; {', '.join(works)})",
            "Reproduced, smaller where vLLM is not overloaded",
        ),
        Claim(
            page,
            "TTFT held: vLLM 1 %, round robin 11 %; TPOT held by BROS 65 %",
            f"{share(at['fcfs'].mean(ttft))}, {share(at['round_robin'].mean(ttft))}; "
            f"BROS {share(at['bros'].mean(ttft))}, of TPOT {share(at['bros'].mean('rt.tpot_attainment'))}",
            "The order; our iterations are never longer than the TPOT",
        ),
    ]


def _accelgen() -> list[Claim]:
    def of(policy: str, figure: str = "11") -> Record:
        return runs("accelgen").of(figure=figure, model="opt-13b", policy=policy)

    def by(figure: str) -> list[float]:
        others = [of(name).mean(figure) for name in ("fcfs", "orca", "fastserve", "fastgen", "sarathi")]
        return [of("accelgen").mean(figure) / other for other in others if other]

    requests, goodput = "all.requests_per_s", "all.goodput_per_s"
    without = [of(name, "12").mean(requests) / of("accelgen").mean(requests) for name in ("/Order", "/Chunk", "/Batch")]
    page = "[AccelGen](accelgen.md)"
    return [
        Claim(
            page,
            "requests/s 1.5 to 10 times the others, tokens/s 1.4 to 11",
            f"{_range(by(requests))} and {_range(by(_TOKENS))} times (fcfs, sarathi, fastgen, fastserve, orca)",
            "Requests/s reproduced; tokens/s hardly",
        ),
        Claim(
            page,
            "goodput 1.4 to 13.7 times; 12 % below the oracle",
            f"{_times(of('accelgen'), [of('sarathi'), of('oracle')], goodput)} times Sarathi-Serve's and the oracle's; "
            f"{change(of('accelgen').mean(_TOKENS) / of('oracle').mean(_TOKENS))} tokens/s against the oracle",
            "**Not reproduced**: the load is thirty times what the cache carries",
        ),
        Claim(
            page,
            "without order, chunks, batching: requests/s and tokens/s fall",
            f"requests/s {', '.join(map(change, without))}",
            "Only the order is worth something here",
        ),
    ]


def _alise() -> list[Claim]:
    found = Record(figures("alise")["throughput"])
    rates = {
        lengths: ", ".join(_at_least(found, lengths, model) for model in ("opt-13b", "opt-6.7b", "opt-2.7b"))
        for lengths in ("sharegpt", "alpaca")
    }
    latency = "all.normalized_s.mean"

    def by(system: str) -> list[float]:
        def of(part: str, name: str, rate: float) -> float:
            labels = {"part": part, "lengths": "alpaca", "model": "opt-13b", "rate": rate, "seed": 1, "policy": name}
            return runs("alise").of(**labels).mean(latency)

        return [of("figure 8", system, rate) / of("figure 6", "ALISE", rate) for rate in (20, 28, 38)]

    long = runs("alise").of(part="long trace")
    times = long.of(policy="vLLM").mean(latency) / long.of(policy="ALISE").mean(latency)
    page = "[ALISE](alise.md)"
    return [
        Claim(
            page,
            "rate at 0.2 s/token relative to vLLM: ShareGPT up to 2.1 times, Alpaca 1.3 to 1.8",
            f"ShareGPT {rates['sharegpt']}, Alpaca {rates['alpaca']} (OPT-13B, 6.7B, 2.7B; traces of 15 to 120 s)",
            f"The order; **over ten minutes of 1.5/s it has {long.of(policy='ALISE').mean(latency):.2f} s/token**, "
            f"vLLM {times:.1f} times as many",
        ),
        Claim(
            page,
            "swapping relative to defer, recompute: up to 1.8, 2.8 times better",
            f"{_range(by('Defer'))}, {_range(by('Recompute'))}",
            "The order, **not the size**",
        ),
    ]


def _at_least(found: Record, lengths: str, model: str) -> str:
    rates = [found.of(lengths=lengths, model=model, policy=name).rows[0]["rate"] for name in ("ALISE", "vLLM")]
    tried = [
        [
            float(row["rate"])
            for row in runs("alise").of(part="figure 6", lengths=lengths, model=model, policy=name).rows
        ]
        for name in ("ALISE", "vLLM")
    ]
    ours, theirs = rates[0] or max(tried[0]), rates[1] or min(tried[1])
    bound = "" if all(rates) else "more than "
    return f"{bound}{int(10 * ours / theirs) / 10:.1f}"


def _apt_serve() -> list[Claim]:
    found = Record(figures("apt_serve")["throughputs"]).of(dataset="sharegpt")
    level, held = "rate at 90%", "all.p99_attainment"
    ratios = [
        found.of(model=model, policy="apt_serve").mean(level) / found.of(model=model, policy="fcfs").mean(level)
        for model in ("opt-13b", "opt-30b", "opt-66b")
    ]
    small = found.of(model="opt-13b")
    sarathi = small.of(policy="apt_serve").mean(level) / small.of(policy="sarathi").mean(level)
    tables = runs("apt_serve").of(part="tables 4, 5")
    points = dict.fromkeys((row["dataset"], row["rate"], row["cv"]) for row in tables.rows)
    gains = []
    for dataset, rate, cv in points:
        at = tables.of(dataset=dataset, rate=rate, cv=cv)
        gain = at.of(policy="apt_serve").mean(held) - at.of(policy="apt_serve, keys and values").mean(held)
        gains.append(100 * gain)
    page = "[Apt-Serve](apt_serve.md)"
    return [
        Claim(
            page,
            "rate at 90 % relative to vLLM, Sarathi-Serve on ShareGPT: 2.3, 2.0 times",
            f"{sum(ratios) / len(ratios):.1f} (three models), {sarathi:.1f} (OPT-13B), of bursts of 300 requests",
            "No rates, so **not comparable**; [rates](apt_serve.md#steady-state) are far closer together",
        ),
        Claim(
            page,
            "hidden caches: up to 7.6 points of attainment",
            f"{min(gains):+.1f} to {max(gains):+.1f} points",
            "**Not reproduced**: here six iterations of a hidden cache cost what dropping it and recomputing does",
        ),
    ]


def claims() -> str:
    found = [*_alignedserve(), *_bros(), *_accelgen(), *_alise(), *_apt_serve()]
    return bullets(f"{one.paper}. Claim: {one.claimed}. Here: {one.ours}. {one.verdict}." for one in found)
