"""Tables of docs/experiments/accelgen.md."""

from collections.abc import Callable, Mapping

from experiments.pages.record import Record, count, runs, share, table

_POLICIES = (*("fcfs", "orca", "fastserve", "fastgen", "sarathi", "accelgen", "oracle", "aligned_slo", "apt_serve"),)
_BASELINES = _POLICIES[:5]
_FEWER = ("fcfs", "sarathi", "accelgen", "oracle", "aligned_slo")
_TOKENS, _REQUESTS, _GOODPUT = "all.tokens_per_s", "all.requests_per_s", "all.goodput_per_s"
_ITERATIONS, _RESPONSE = "all.token_attainment", "all.end_to_end_s.mean"


def _of(figure: str, **labels: object) -> Record:
    return runs("accelgen").of(figure=figure, **labels)


def figure_11() -> str:
    rows = []
    for policy in _POLICIES:
        of = _of("11", model="opt-13b", policy=policy)
        cells = [
            f"{count(of.mean(_TOKENS))} ({count(of.spread(_TOKENS))})",
            f"{of.mean(_REQUESTS):.2f}",
            f"{of.mean(_GOODPUT):.3f} ({of.spread(_GOODPUT):.2f})",
            share(of.mean(_ITERATIONS)),
            f"{100 * of.mean('all.attainment'):.2f} %",
            f"{100 * of.mean('offline.attainment'):.1f} %",
            count(of.mean(_RESPONSE)),
            count(of.mean("num_evictions")),
        ]
        rows.append([policy, *cells])
    heads = ("policy", "tokens/s", "requests/s", "goodput/s", "iteration SLOs", "requests held", "deadlines held")
    return table([*heads, "JCT s", "evictions"], rows)


def figure_12() -> str:
    rows = []
    for name in ("nothing", "/Order", "/Chunk", "/Chunk, whole", "/Batch"):
        of = _of("11", model="opt-13b", policy="accelgen") if name == "nothing" else _of("12", policy=name)
        requests = f"{of.mean(_REQUESTS):.2f}"
        rows.append([name, count(of.mean(_TOKENS)), requests, f"{of.mean(_GOODPUT):.3f}", share(of.mean(_ITERATIONS))])
    return table(["without", "tokens/s", "requests/s", "goodput/s", "iteration SLOs"], rows)


def others() -> str:
    points: Mapping[str, Mapping[str, object]] = {
        "Llama-2-13B": {"figure": "11", "model": "llama-2-13b"},
        "OPT-175B": {"figure": "11", "model": "opt-175b"},
        "Llama-3-70B": {"figure": "11", "model": "llama-3-70b"},
        "OPT-13B, 0.15/s": {"figure": "rates", "rate": 0.15},
        "OPT-13B, 0.5/s": {"figure": "rates", "rate": 0.5},
    }
    rows = []
    for name, labels in points.items():
        of = [runs("accelgen").of(**labels, policy=policy) for policy in _FEWER]
        rows.append([name, *(_three(one, _ITERATIONS) for one in of)])
    return table(["", *_FEWER], rows)


def _three(of: Record, last: str) -> str:
    if not of:
        return ""
    value = of.mean(last)
    return f"{count(of.mean(_TOKENS))}, {of.mean(_REQUESTS):.2f}, " + (
        f"{value:.3f}" if last == _GOODPUT else share(value)
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "figure 11": figure_11,
    "figure 12": figure_12,
    "others": others,
}
