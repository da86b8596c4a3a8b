"""Tables of docs/experiments/alise.md."""

from collections.abc import Callable, Mapping

from experiments.pages.record import Record, digits, figures, runs, table

_LATENCY = "all.normalized_s.mean"
_LENGTHS = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}
_MODELS = ("opt-13b", "opt-6.7b", "opt-2.7b")
_SYSTEMS = {
    "vLLM": "vLLM (`fcfs`)",
    "ALISE": "ALISE",
    "Oracle": "Oracle (true lengths)",
    "Recompute": "Recompute",
    "Defer": "Defer",
    "fastserve": "`fastserve`",
    "sarathi": "`sarathi`",
    "ORCA, exact": "ORCA, exact",
    "aligned_slo": "`aligned_slo`",
}
_POINTS = {
    "Alpaca 20/s": ("alpaca", 20),
    "28/s": ("alpaca", 28),
    "38/s": ("alpaca", 38),
    "ShareGPT 1.7/s": ("sharegpt", 1.7),
    "2.2/s": ("sharegpt", 2.2),
    "3/s": ("sharegpt", 3.0),
}
_OTHERS = ("ORCA", "ORCA, exact", "sarathi", "fastserve")


def _of(part: str, **labels: object) -> Record:
    return runs("alise").of(part=part, **labels)


def latency() -> str:
    rows = []
    for system, name in _SYSTEMS.items():
        part = "figure 8" if system in ("Recompute", "Defer") else "figure 6"
        cells = [
            _latency(_of(part, model="opt-13b", lengths=lengths, rate=rate, policy=system))
            for lengths, rate in _POINTS.values()
        ]
        rows.append([name, *cells, _latency(_of("long trace", policy=system))])
    return table(["", *_POINTS, "1.5/s over 600 s"], rows)


def _latency(of: Record, figure: str = _LATENCY) -> str:
    if not of:
        return ""
    text = digits(of.mean(figure))
    return text if len(of.rows) == 1 else f"{text} ({digits(of.spread(figure), 2)})"


def rates() -> str:
    rows = []
    for model in _MODELS:
        for lengths, name in _LENGTHS.items():
            rate = {system: _rate(model, lengths, system) for system in ("vLLM", "ALISE", "aligned_slo", *_OTHERS)}
            others = "; ".join(f"{system} {rate[system]}" for system in _OTHERS if rate[system])
            cells = [rate["vLLM"], rate["ALISE"], rate["aligned_slo"], _times(rate["ALISE"], rate["vLLM"]), others]
            rows.append([f"{model.upper()}, {name}", *cells])
    return table(["", "vLLM", "ALISE", "`aligned_slo`", "ALISE by vLLM", "others"], rows)


def _rate(model: str, lengths: str, system: str) -> str:
    found = Record(figures("alise")["throughput"]).of(model=model, lengths=lengths, policy=system)
    of = _of("figure 6", model=model, lengths=lengths, policy=system)
    if not found:
        return ""
    if found.rows[0]["rate"] is not None:
        return digits(float(found.rows[0]["rate"]))
    tried = sorted(float(row["rate"]) for row in of.rows)
    is_above = of.of(rate=min(of.rows, key=lambda row: float(row["rate"]))["rate"]).mean(_LATENCY) < 0.2
    return f"above {tried[-1]:g}" if is_above else f"below {tried[0]:g}"


def _times(ours: str, theirs: str) -> str:
    is_bound = ours.startswith("above") or theirs.startswith("below")
    if ours.startswith("below") or theirs.startswith("above"):
        return ""
    times = float(ours.split()[-1]) / float(theirs.split()[-1])
    return f"more than {int(10 * times) / 10:.1f}" if is_bound else f"{times:.1f}"


TABLES: Mapping[str, Callable[[], str]] = {
    "latency": latency,
    "rates": rates,
}
