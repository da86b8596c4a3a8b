"""Table of docs/experiments/leak.md."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from experiments.pages.record import Record, bold, count, digits, runs, share, table

_KNOWN: Mapping[str, str] = {  # what schedulers are told, and what that is called on the page
    "lengths and costs": "told lengths and costs",
    "costs": "costs",
    "lengths within a factor of two": "lengths within two",
    "neither": bold("neither"),
}
_TOKENS, _GOODPUT, _LATENCY = "tokens/s", "goodput/s", "s/token"


class Line(NamedTuple):
    """One line of the table: a policy's figure at one point."""

    experiment: str
    part: str
    point: str
    policy: str
    said: str = "held"
    figure: str = "value"


_LINES = (
    *(
        Line(f"AlignedServe's headline, {point}", "alignedserve", point, policy, _TOKENS)
        for point in ("one block per sequence", "load-balanced")
        for policy in ("aligned", "aligned_slo")
    ),
    *(
        Line(f"Apt-Serve, {name}", "apt_serve", point, policy)
        for name, point in {"ShareGPT 6/s": "sharegpt 6/s", "LongBench 1.5/s": "longbench 1.5/s"}.items()
        for policy in ("apt_serve", "aligned_slo")
    ),
    *(
        Line(f"Unseen, {name}", "unseen", point, policy)
        for name, point in {"code 4/s": "azure_code 4/s", "arXiv 2.5/s": "arxiv 2.5/s"}.items()
        for policy in ("bros", "aligned_slo")
    ),
    *(
        Line(f"the same, {name}", "unseen", point, "aligned_slo", "best-effort tokens/s", "be.tokens_per_s")
        for name, point in {"code": "azure_code 4/s", "arXiv": "arxiv 2.5/s"}.items()
    ),
    *(Line("`simulate`, 4/s", "simulate", "4/s", policy) for policy in ("aligned_slo", "aligned", "fcfs", "sarathi")),
    *(
        Line("AccelGen, 8/s", "accelgen", "8/s", policy, said, figure)
        for said, figure in {_GOODPUT: "value", _TOKENS: "all.tokens_per_s"}.items()
        for policy in ("accelgen", "aligned_slo")
    ),
    *(Line("BROS, 10/s", "bros", "10/s", policy) for policy in ("bros", "aligned_slo")),
    *(
        Line(f"ALISE, {name}", "alise", point, policy, _LATENCY)
        for name, point in {"Alpaca 20/s": "alpaca 20/s", "ShareGPT 1.7/s": "sharegpt 1.7/s"}.items()
        for policy in ("ALISE", "aligned_slo")
    ),
)


def told() -> str:
    """Return one point of each experiment by what schedulers are told, means over the seeds."""
    return table(["experiment", "policy", "figure", *_KNOWN.values()], map(_row, _LINES))


def _row(line: Line) -> list[str]:
    of = runs("leak").of(part=line.part, point=line.point, policy=line.policy)
    cells = [_cell(of.of(knows=name), line) for name in _KNOWN]
    return [line.experiment, f"`{line.policy.lower()}`", line.said, *cells[:-1], bold(cells[-1])]


def _cell(of: Record, line: Line) -> str:
    if not of:
        return ""
    value = of.mean(line.figure)
    if line.said == "held":
        return share(value)
    if line.said == _GOODPUT:
        return f"{value:.3f}"
    return digits(value) if value < 100 else count(value)


TABLES: Mapping[str, Callable[[], str]] = {"told": told}
