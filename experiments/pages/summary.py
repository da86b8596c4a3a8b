"""Tables of docs/experiments/README.md: every paper's claims beside ours, and `aligned_slo` beside each policy."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from experiments.pages.claims import claims
from experiments.pages.record import (
    Record,
    bold,
    bullets,
    count,
    digits,
    figures,
    milliseconds,
    runs,
    seconds,
    share,
    table,
)
from experiments.steady import is_served

NOT_LOOKED_INTO = bold("Not looked into.")

_LARGER_BATCHES = (
    "Nothing bounds an iteration where no request has an objective; its batches are larger and more mixed than"
    " `aligned`'s ([both](alignedserve.md#the-headline-opt-27b-95--short))."
)
_DEADLINES = (
    "In an overload of thirty times it gives up long documents, the only requests with deadlines, for short requests"
    " ([more](accelgen.md#figure-11-opt-13b-8-requestss-three-seeds-of-100-s))."
)
_MORE_REQUESTS = (
    "It ends twice as many requests with fewer tokens each, and computes 28 % more prompt tokens, 19 % more in all"
    " ([more](accelgen.md#other-models-other-rates-bursts-of-50-and-200-s))."
)
_LONG_ITERATIONS = (
    "Its iterations last about as long as the shortest objective or longer, which then bounds nothing"
    " ([more](accelgen.md#other-models-other-rates-bursts-of-50-and-200-s))."
)
_SHORT_FIRST = (
    "Without objectives the request with far less left to do goes first, so long answers pay for the mean"
    " ([more](alise.md#the-record-bursts-of-15-to-120-s))."
)
_BURSTS = (
    "A burst is where a policy must know which answers are short; of three seeds with one burst each it leads in two"
    " ([more](apt_serve.md#opt-13b-at-the-papers-rates-bursts-of-300-requests))."
)
WHY: Mapping[str, str] = {  # by the names of the rows
    "the same, p99 TBT": _LARGER_BATCHES,
    "the same: iteration-level SLOs, deadlines held": _DEADLINES,
    "AccelGen, tokens/s: Llama-2-13B, OPT-175B, Llama-3-70B": _MORE_REQUESTS,
    "the same, iteration-level SLOs": _LONG_ITERATIONS,
    "the same, p99 of the response, s": _SHORT_FIRST,
    "Apt-Serve, bursts of 300 (three seeds), ShareGPT 6/s held: CV 1, 5, 10": _BURSTS,
}


_UNION = "aligned_slo"
_STRAGGLER, _BALANCED = "one_block_per_sequence", "load_balanced"
_TOKENS, _TBT, _TPOT = "all.tokens_per_s", "all.tbt_s.p99", "all.tpot_s.p99"
_SAME = 0.005  # of a figure: nearer ones count as equal


class Compared(NamedTuple):
    """One figure of a paper's policy and of `aligned_slo` at one point."""

    theirs: float
    ours: float
    shown: Callable[[float], str]
    is_more_better: bool = True

    def verdict(self) -> str:
        """Return by how much `aligned_slo` is better or worse, as a share of the paper's figure."""
        if abs(self.ours - self.theirs) <= _SAME * abs(self.theirs):
            return "equal"
        is_better = (self.ours > self.theirs) == self.is_more_better
        size = f"{abs(self.ours / self.theirs - 1):.0%}".replace("%", " %") if self.theirs else ""
        return "better" if is_better else bold(f"worse by {size}")


def _pair(of: Callable[[str], Record], policies: tuple[str, str], figure: str) -> tuple[float, float]:
    return of(policies[0]).mean(figure), of(policies[1]).mean(figure)


# --- each paper's policy


def _alignedserve() -> dict[str, list[Compared]]:
    def at(part: str, **labels: object) -> Callable[[str], Record]:
        return lambda system: runs("alignedserve").of(part=part, system=system, **labels)

    def tokens(part: str, **labels: object) -> Compared:
        return Compared(*_pair(at(part, **labels), ("aligned", _UNION), _TOKENS), count)

    def rate(part: str, **labels: object) -> Compared:
        return Compared(*_pair(at(f"steady{part}", **labels), ("aligned", _UNION), "all.loaded_tokens_per_s"), count)

    def gap(part: str, **labels: object) -> Compared:
        return Compared(*_pair(at(part, **labels), ("aligned", _UNION), _TBT), milliseconds, is_more_better=False)

    name, kernels = "AlignedServe", (_STRAGGLER, _BALANCED)
    return {
        f"{name}, burst of 600 (three seeds), tokens/s: waves as long as the longest, balanced": [
            tokens("headline", kernel=kernel) for kernel in kernels
        ],
        "the same, p99 TBT": [gap("headline", kernel=kernel) for kernel in kernels],
        f"{name}, **in steady state**, tokens/s, p99 TBT": [rate(""), gap("steady")],
        "the same, tokens/s: ShareGPT, LongBench, Azure": [
            rate(", recordings", lengths=one) for one in ("sharegpt", "longbench", "azure")
        ],
        "the same, tokens/s: OPT-2.7B, 6.7B, 30B; 70 % short": [
            *(rate(", models", model=model) for model in ("opt-2.7b", "opt-6.7b", "opt-30b")),
            rate(", models", model="opt-13b"),
        ],
        "the same, eight accelerators: tokens/s, p99 TBT": [
            rate(", eight accelerators"),
            gap("steady, eight accelerators"),
        ],
    }


def _bros() -> dict[str, list[Compared]]:
    def headline(figure: str, shown: Callable[[float], str]) -> Compared:
        of = runs("bros").of(part="headline")
        return Compared(*_pair(lambda policy: of.of(policy=policy), ("bros", _UNION), figure), shown)

    return {
        "BROS, burst of 120 s at 10/s (three seeds): held, best-effort requests/s": [
            headline("rt.attainment", share),
            headline("be.loaded_requests_per_s", lambda value: f"{value:.2f}"),
        ],
    }


def _accelgen() -> dict[str, list[Compared]]:
    def at(figure: str, shown: Callable[[float], str], model: str = "opt-13b", of: str = "11") -> Compared:
        rows = runs("accelgen").of(figure=of, model=model)
        return Compared(*_pair(lambda policy: rows.of(policy=policy), ("accelgen", _UNION), figure), shown)

    goodput, iterations = "all.goodput_per_s", "all.token_attainment"
    return {
        "AccelGen, 8/s (three seeds): tokens/s, requests/s, goodput/s": [
            at(_TOKENS, count),
            at("all.requests_per_s", lambda value: f"{value:.2f}"),
            at(goodput, lambda value: f"{value:.3f}"),
        ],
        "the same: iteration-level SLOs, deadlines held": [at(iterations, share), at("offline.attainment", share)],
        "AccelGen, tokens/s: Llama-2-13B, OPT-175B, Llama-3-70B": [
            at(_TOKENS, count, model) for model in ("llama-2-13b", "opt-175b", "llama-3-70b")
        ],
        "the same, iteration-level SLOs": [
            at(iterations, share, model) for model in ("llama-2-13b", "opt-175b", "llama-3-70b")
        ],
    }


def _alise() -> dict[str, list[Compared]]:
    points = (("figure 6", "alpaca", 20), ("figure 6", "sharegpt", 1.7), ("long trace", "sharegpt", 1.5))

    def at(point: tuple[str, str, float], figure: str, shown: Callable[[float], str]) -> Compared:
        part, lengths, rate = point
        of = runs("alise").of(part=part, lengths=lengths, rate=rate, model="opt-13b")
        pair = _pair(lambda policy: of.of(policy=policy), ("ALISE", _UNION), figure)
        return Compared(*pair, shown, is_more_better=False)

    return {
        "ALISE, s/token: Alpaca 20/s, ShareGPT 1.7/s, ten minutes of 1.5/s": [
            at(point, "all.normalized_s.mean", digits) for point in points
        ],
        "the same, p99 of the response, s": [at(point, "all.end_to_end_s.p99", count) for point in points],
    }


def _apt_serve() -> dict[str, list[Compared]]:
    def held(part: str, dataset: str, rate: float, cv: float) -> Compared:
        of = runs("apt_serve").of(part=part, dataset=dataset, rate=rate, cv=cv)
        pair = _pair(lambda policy: of.of(policy=policy), ("apt_serve", _UNION), "all.p99_attainment")
        return Compared(*pair, share)

    variations = (1.0, 5.0, 10.0)
    return {
        "Apt-Serve, bursts of 300 (three seeds), ShareGPT 6/s held: CV 1, 5, 10": [
            held("tables 4, 5", "sharegpt", 6.0, cv) for cv in variations
        ],
        "Apt-Serve, LongBench 1.5/s, likewise": [held("tables 4, 5", "longbench", 1.5, cv) for cv in variations],
        "Apt-Serve, burst of 300, HumanEval 9/s: CV 1, 5, 10": [
            held("figure 9", "humaneval", 9.0, cv) for cv in variations
        ],
    }


def _steady() -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for page, name, of, figure in (
        ("bros", "BROS", "rt", "rt.attainment"),
        ("apt_serve", "Apt-Serve", "all", "all.p99_attainment"),
    ):
        steady = runs(page).of(part="steady")
        both = [set(steady.of(policy=policy).values("rate")) for policy in (page, _UNION)]
        rates = sorted(both[0] & both[1])
        if not rates:
            continue
        at = {rate: partial(_of_policy, steady.of(rate=rate)) for rate in rates}
        names = ", ".join(f"{rate:g}" for rate in rates)
        found[f"{name}, **in steady state** at {names}/s: held if served"] = [
            _compared_held(at[rate], page, of, figure) for rate in rates
        ]
        found["the same, longest gap"] = [_longest_gaps(at[rate], page, f"{of}.longest_gap_s") for rate in rates]
    return found


def _held(at: Record, of: str, figure: str) -> float:
    return at.mean(figure) if is_served(at.values(f"{of}.completed_of_arrived")) else 0.0


def _compared_held(at: Callable[[str], Record], policy: str, of: str, figure: str) -> Compared:
    theirs, ours = (_held(at(name), of, figure) for name in (policy, _UNION))
    return Compared(theirs, ours, share)


def _longest_gaps(at: Callable[[str], Record], policy: str, figure: str) -> Compared:
    theirs, ours = (max(at(name).values(figure)) for name in (policy, _UNION))
    return Compared(theirs, ours, seconds, is_more_better=False)


def _of_policy(of: Record, policy: str) -> Record:
    return of.of(policy=policy)


def _rates() -> list[list[str]]:
    points = (("sharegpt", "opt-13b"), ("sharegpt", "opt-30b"), ("sharegpt", "opt-66b"))
    others = (("humaneval", "opt-13b"), ("longbench", "opt-13b"))
    rows = []
    for name, at in (("ShareGPT on OPT-13B, 30B, 66B", points), ("HumanEval, LongBench", others)):
        theirs, ours = ([_rate(policy, point) for point in at] for policy in ("apt_serve", _UNION))
        said = [_rate_verdict(one, other) for one, other in zip(theirs, ours, strict=True)]
        cells = [", ".join("beyond" if one is None else f"{one:.2f}" for one in rates) for rates in (theirs, ours)]
        rows.append([f"Apt-Serve, bursts of 300, 90 % held if sent at: {name}", *cells, _shortened(said)])
    return rows


def _rate(policy: str, point: tuple[str, str]) -> float | None:
    of = Record(figures("apt_serve")["throughputs"]).of(policy=policy, dataset=point[0], model=point[1])
    found = of.rows[0]["rate at 90%"]
    return None if found is None else float(found)


def _rate_verdict(theirs: float | None, ours: float | None) -> str:
    if theirs is None or ours is None:
        return "equal" if theirs is ours else "better" if ours is None else bold("worse")
    return Compared(theirs, ours, str).verdict()


def union() -> str:
    return table(["", "the paper's policy", f"`{_UNION}`", "it is"], _rows())


def worse() -> str:
    of_reasons: dict[str, list[str]] = {}
    last = ""
    for name, *_, verdicts in _rows():
        last = name if not name.startswith("the same") else last
        if "worse" in verdicts:
            shown = name if name == last else f"{last.partition(',')[0]}: {name.removeprefix('the same').lstrip(',: ')}"
            of_reasons.setdefault(WHY.get(name, NOT_LOOKED_INTO), []).append(shown)
    return bullets(f"{reason} In: *{'*; *'.join(names)}*." for reason, names in of_reasons.items())


def _rows() -> list[list[str]]:
    sections = (_alignedserve(), _bros(), _accelgen(), _alise(), _apt_serve())
    rows = [_row(name, compared) for section in sections for name, compared in section.items()]
    return [*rows, *_rates(), *(_row(name, compared) for name, compared in _steady().items())]


def _row(name: str, compared: Sequence[Compared]) -> list[str]:
    theirs = ", ".join(one.shown(one.theirs) for one in compared)
    ours = ", ".join(one.shown(one.ours) for one in compared)
    return [name, theirs, ours, _shortened([one.verdict() for one in compared])]


def _shortened(verdicts: Sequence[str]) -> str:
    return verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts)


TABLES: Mapping[str, Callable[[], str]] = {"claims": claims, "union": union, "worse": worse}
