"""Tables of docs/experiments/accelgen.md."""

from collections.abc import Callable, Mapping, Sequence

from experiments.pages.record import Record, count, runs, share, table

_POLICIES = (*("fcfs", "orca", "fastserve", "fastgen", "sarathi", "accelgen", "oracle", "aligned_slo", "apt_serve"),)
_BASELINES = _POLICIES[:5]
_FEWER = ("fcfs", "sarathi", "accelgen", "oracle", "aligned_slo")
_TOKENS, _REQUESTS, _GOODPUT = "all.tokens_per_s", "all.requests_per_s", "all.goodput_per_s"
_ITERATIONS, _RESPONSE = "all.token_attainment", "all.end_to_end_s.mean"


def _of(figure: str, **labels: object) -> Record:
    return runs("accelgen").of(figure=figure, **labels)


def figure_11() -> str:
    """Return OPT-13B at 8 requests/s."""
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


def claims() -> str:
    """Return AccelGen by each of the others, beside the paper's range."""
    ours = _of("11", model="opt-13b", policy="accelgen")
    measures = {
        "tokens/s over the others": ("1.42 to 11.21 times", _TOKENS, False),
        "requests/s over the others": ("1.54 to 10 times", _REQUESTS, False),
        "goodput": ("1.43 to 13.71 times", _GOODPUT, False),
        "JCT of those that ended": ("1.61 to 12.22 times lower", _RESPONSE, True),
    }
    rows = []
    for name, (paper, figure, is_less_better) in measures.items():
        cells = []
        for policy in (*_BASELINES, "oracle", "aligned_slo"):
            theirs = _of("11", model="opt-13b", policy=policy).mean(figure)
            above, below = (theirs, ours.mean(figure)) if is_less_better else (ours.mean(figure), theirs)
            cells.append(f"{above / below:.2f}" if below else "")
        rows.append([name, paper, *cells])
    return table(["AccelGen by", "paper, all baselines", *_BASELINES, "oracle", "aligned_slo"], rows)


def figure_12() -> str:
    """Return AccelGen without each method."""
    rows = []
    for name in ("nothing", "/Order", "/Chunk", "/Chunk, whole", "/Batch"):
        of = _of("11", model="opt-13b", policy="accelgen") if name == "nothing" else _of("12", policy=name)
        requests = f"{of.mean(_REQUESTS):.2f}"
        rows.append([name, count(of.mean(_TOKENS)), requests, f"{of.mean(_GOODPUT):.3f}", share(of.mean(_ITERATIONS))])
    return table(["without", "tokens/s", "requests/s", "goodput/s", "iteration SLOs"], rows)


def others() -> str:
    """Return other models, and rates nearer to what OPT-13B can serve."""
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
    """Return tokens/s, requests/s and one figure more."""
    if not of:
        return ""
    value = of.mean(last)
    return f"{count(of.mean(_TOKENS))}, {of.mean(_REQUESTS):.2f}, " + (
        f"{value:.3f}" if last == _GOODPUT else share(value)
    )


def low_rates() -> str:
    """Return requests and deadlines held at the low rates."""
    policies: Sequence[str] = _FEWER[1:]
    rows = []
    for rate in (0.15, 0.5):
        of = [_of("rates", rate=rate, policy=policy) for policy in policies]
        held = [f"{share(one.mean('all.attainment'), 0)}, {share(one.mean('offline.attainment'), 0)}" for one in of]
        rows.append([f"OPT-13B, {rate:g}/s", *held])
    return table(["requests held, deadlines held", *policies], rows)


def reasons() -> str:
    """Return what the distance depends on."""
    policies = ("sarathi", "accelgen", "aligned_slo")
    changed = dict.fromkeys(row["what"] for row in _of("why").rows)
    rows = [
        [what, *(_three(_of("why", what=what, policy=policy), _GOODPUT) for policy in policies)] for what in changed
    ]
    return table(["changed", *policies], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "figure 11": figure_11,
    "claims": claims,
    "figure 12": figure_12,
    "others": others,
    "low rates": low_rates,
    "reasons": reasons,
}
