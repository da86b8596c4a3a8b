"""Tables of docs/experiments/alignedserve.md."""

from collections.abc import Callable, Mapping

from benchmarks.measuring.intervals import interval
from experiments.pages.record import Record, bullets, change, count, milliseconds, runs, share, table

_SYSTEMS = {
    "aligned": "aligned",
    "aligned_slo": "aligned_slo",
    "distserve": "distserve",
    "vllm": "vllm (fcfs, colocated)",
    "fastgen": "fastgen (colocated)",
}
_COMPARED = ("aligned", "aligned_slo", "distserve", "vllm", "fastgen")
_BASELINES = ("vllm", "distserve", "fastgen")
_STRAGGLER, _BALANCED = "one_block_per_sequence", "load_balanced"
_KERNELS = {_STRAGGLER: "one block of threads per sequence", _BALANCED: "load-balanced"}
_TOKENS, _TBT, _TPOT = "all.tokens_per_s", "all.tbt_s.p99", "all.tpot_s.p99"


def _of(part: str, **labels: object) -> Record:
    return runs("alignedserve").of(part=part, **labels)


def claims() -> str:
    """Return the headline against the baselines, beside the paper's claims."""
    rows = []
    for system in ("aligned", "aligned_slo"):
        rows += [
            [f"tokens/s of {system}, times", "1.32, 1.35, 1.85" if system == "aligned" else ""],
            ["p99 TBT, times lower", "1.74 to 3.05" if system == "aligned" else ""],
            ["p99 TPOT of a request, times lower", ""],
        ]
        for kernel in _KERNELS:
            means = {name: _of("headline", kernel=kernel, system=name) for name in _COMPARED}
            rows[-3].append(_ratios(means, system, _TOKENS))
            rows[-2].append(_ratios(means, system, _TBT))
            rows[-1].append(_ratios(means, system, _TPOT))
    heads = ["relative to vLLM, DistServe, FastGen", "paper", "one block per sequence", "load-balanced"]
    return table(heads, rows)


def _ratios(means: Mapping[str, Record], system: str, figure: str) -> str:
    ours = means[system].mean(figure)
    theirs = [means[name].mean(figure) for name in _BASELINES]
    return ", ".join(f"{ours / one if figure == _TOKENS else one / ours:.2f}" for one in theirs)


def parts() -> str:
    means = {name: _of("figure 14", system=name).mean(_TOKENS) for name in ("aligned", *_ABLATED)}
    rows = [["aligned", "", count(means["aligned"]), ""]]
    paper = {"aligned w/o P": "-14.7 %", "aligned w/o P&B": "a further -28.5 %", "aligned w/o B": ""}
    for name, said in _ABLATED.items():
        before = means["aligned w/o P" if name == "aligned w/o P&B" else "aligned"]
        further = "a further " if name == "aligned w/o P&B" else ""
        rows.append([said, paper[name], count(means[name]), f"{further}{change(means[name] / before)}"])
    return table(["Azure, OPT-13B, one block per sequence", "paper", "tokens/s", "change"], rows)


_ABLATED = {
    "aligned w/o P": "without prefetching (no candidate buffers: caches come over PCIe when they are needed)",
    "aligned w/o P&B": "and without batches by length (`batching.policy=fcfs`)",
    "aligned w/o B": "batches first come, first served alone",
}


# --- rates: ten minutes, decode attention as a list schedule

_LOADED, _LOST = "all.loaded_tokens_per_s", "straggler_share"
_SCHEDULED = "paged_v1"
_BY_KERNEL = (
    ("opt-13b", _SCHEDULED),
    ("opt-13b", "paged_v1_worst_order"),
    ("opt-13b", _BALANCED),
    ("opt-13b", _STRAGGLER),
    ("llama-3-8b", "flash_attention_2"),
    ("llama-3-8b", _BALANCED),
)
_NAMES = {"opt": "OPT", "llama": "Llama"}
_NOT_YET = bullets(["Not simulated yet"])


def steady() -> str:
    """Return the headline as a rate, with 95 % intervals where it has several seeds, of what was simulated."""
    found = {system: of for system in _COMPARED if (of := _of("steady", system=system))}
    if "aligned" not in found:
        return _NOT_YET
    ours, rows = found["aligned"].mean(_LOADED), []
    for system, of in found.items():
        tokens = interval(of.values(_LOADED))
        rows.append(
            [
                _SYSTEMS[system],
                f"{count(tokens.mean)} ± {count(tokens.half)}" if tokens.half else count(tokens.mean),
                "" if system == "aligned" else f"{ours / tokens.mean:.2f}",
                milliseconds(of.mean(_TBT)),
                milliseconds(of.mean(_TPOT)),
                count(of.mean("ledger.batch")),
                f"{of.mean('ledger.spread'):.1f}",
                share(of.mean(_LOST)),
            ]
        )
    heads = ["", "tokens/s", "of aligned by its", "p99 TBT", "p99 TPOT of a request", "batch", "longest by mean"]
    return table([*heads, "attention lost to stragglers"], rows)


def steady_kernels() -> str:
    rows = []
    for model, kernel in _BY_KERNEL:
        labels = {"part": _part_of(model, kernel), "model": model, "kernel": kernel, "seed": 1}
        of = {system: runs("alignedserve").of(**labels, system=system) for system in _COMPARED}
        if not all(of[system] for system in ("aligned", "distserve", "vllm")):
            continue
        cells = [count(one.mean(_LOADED)) if one else "-" for one in of.values()]
        lost = ", ".join(share(of[system].mean(_LOST)) for system in ("aligned", "vllm"))
        ratios = (f"{of['aligned'].mean(_LOADED) / of[one].mean(_LOADED):.2f}" for one in ("vllm", "distserve"))
        rows.append([f"{_model_name(model)}, `{kernel}`", *cells, *ratios, lost])
    if not rows:
        return _NOT_YET
    return table(["tokens/s", *_COMPARED, "by vLLM's", "by DistServe's", "lost to stragglers: aligned, vLLM"], rows)


def _part_of(model: str, kernel: str) -> str:
    if model != _BY_KERNEL[0][0]:
        return "steady, grouped heads"
    return "steady" if kernel == _SCHEDULED else "steady, kernels"


def _model_name(model: str) -> str:
    family, _, rest = model.partition("-")
    return f"{_NAMES[family]}-{rest.upper()}"


TABLES: Mapping[str, Callable[[], str]] = {
    "steady": steady,
    "steady, kernels": steady_kernels,
    "claims": claims,
    "parts": parts,
}
