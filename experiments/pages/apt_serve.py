"""Tables of docs/experiments/apt_serve.md."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import zip_longest

from experiments.pages.record import Record, figures, runs, share, table
from experiments.pages.steady import steady

_KV_ONLY = "apt_serve, keys and values"
_NAMES = {"fcfs": "vLLM", _KV_ONLY: "Apt-Serve, keys and values", "apt_serve": "Apt-Serve"}
_UNION = "aligned_slo"
_COMPARED = ("fcfs", _KV_ONLY, "apt_serve", _UNION)
_LENGTHS = {"sharegpt": "ShareGPT", "humaneval": "HumanEval", "longbench": "LongBench"}
_POINTS = (("sharegpt", 3.0), ("sharegpt", 6.0), ("longbench", 1.5))
_PAPER = {  # Tables 4 and 5
    ("sharegpt", 3.0): (26.4, 99.5, 99.5),
    ("sharegpt", 6.0): (20.0, 65.7, 67.3),
    ("longbench", 1.5): (11.8, 96.6, 98.2),
}
_PAPER_IN_BURSTS = {("sharegpt", 6.0): (18.1, 66.7, 67.7)}  # CV 5
_HELD = "all.p99_attainment"
_MODELS = ("opt-13b", "opt-30b", "opt-66b")
_BASELINES = {
    "fcfs": "vLLM",
    "sarathi": "Sarathi",
    "fastgen": "FastGen",
    "apt_serve": "Apt-Serve",
    _UNION: "`aligned_slo`",
}


def _name(policy: str) -> str:
    return _NAMES.get(policy, f"`{policy}`")


def _at(part: str, **labels: object) -> Record:
    return runs("apt_serve").of(part=part, **labels)


def attainment() -> str:
    """Return what is held at the paper's rates."""
    rows = []
    for dataset, rate in _POINTS:
        paper = (*(f" ({value})" for value in _PAPER[dataset, rate]), "")
        cells = []
        for policy, said in zip(_COMPARED, paper, strict=True):
            of = _at("tables 4, 5", dataset=dataset, rate=rate, cv=1.0, policy=policy)
            cells.append(f"{share(of.mean(_HELD))} [{100 * of.spread(_HELD):.0f}]{said}")
        rows.append([f"{_LENGTHS[dataset]} {rate:g}/s", *cells])
    for dataset, rate in _POINTS:
        known = [f" ({value} at CV 5)" for value in _PAPER_IN_BURSTS.get((dataset, rate), ())]
        cells = [_bursts("tables 4, 5", dataset, rate, policy, (5.0, 10.0), "; ") for policy in _COMPARED]
        cells = [cell + one for cell, one in zip_longest(cells, known, fillvalue="")]
        rows.append([f"{_LENGTHS[dataset]} {rate:g}/s, CV 5; 10", *cells])
    return table(["", *map(_name, _COMPARED)], rows)


def _bursts(part: str, dataset: str, rate: float, policy: str, variations: Iterable[float], between: str) -> str:
    of = [_at(part, dataset=dataset, rate=rate, cv=cv, policy=policy).mean(_HELD) for cv in variations]
    return between.join(share(value).removesuffix(" %") for value in of) + " %"


def rates_at_90() -> str:
    level = "90%"
    points = [("sharegpt", model) for model in _MODELS] + [("humaneval", "opt-13b"), ("longbench", "opt-13b")]
    rows = []
    for dataset, model in points:
        rates = {policy: _rate(dataset, model, policy, level) for policy in _BASELINES}
        baseline = rates["fcfs"]
        name = f"{_LENGTHS[dataset]}, {model.upper()}"
        rows.append([name, *(_rate_cell(dataset, model, policy, rates[policy], baseline) for policy in _BASELINES)])
    return table([f"bursts: {level} held when sent at", *_BASELINES.values()], rows)


def _rate(dataset: str, model: str, policy: str, level: str) -> float | None:
    of = Record(figures("apt_serve")["throughputs"]).of(dataset=dataset, model=model, policy=policy)
    found = of.rows[0][f"rate at {level}"] if of else None
    return None if found is None else float(found)


def _rate_cell(dataset: str, model: str, policy: str, rate: float | None, baseline: float | None) -> str:
    of = _at("figure 8", dataset=dataset, model=model, policy=policy)
    if not of:
        return ""
    if rate is None:
        highest = max(of.rows, key=lambda row: float(row["rate"]))
        return f"above {int(highest['rate'])} ({share(highest[_HELD], 0)} there)"
    text = f"{rate:.2f}" if rate < 9.5 else f"{rate:.1f}"
    is_compared = policy in ("apt_serve", _UNION) and baseline
    return f"{text} ({rate / baseline:.1f})" if is_compared and baseline else text


TABLES: Mapping[str, Callable[[], str]] = {
    "steady": partial(steady, "apt_serve", "all", _HELD),
    "attainment": attainment,
    "rates at 90": rates_at_90,
}
