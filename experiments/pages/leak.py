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
_UNION = "aligned_slo"
_TOKENS, _GOODPUT, _LATENCY = "tokens/s", "goodput/s", "s/token"


class Line(NamedTuple):
    """One line of the table: the figure of `aligned_slo` at one point."""

    experiment: str
    part: str
    point: str
    said: str = "held"
    figure: str = "value"


_LINES = (
    Line("AlignedServe's headline, one block per sequence", "alignedserve", "one block per sequence", _TOKENS),
    Line("AlignedServe's headline, load-balanced", "alignedserve", "load-balanced", _TOKENS),
    Line("Apt-Serve, ShareGPT 6/s", "apt_serve", "sharegpt 6/s"),
    Line("Apt-Serve, LongBench 1.5/s", "apt_serve", "longbench 1.5/s"),
    Line("Unseen, code 4/s", "unseen", "azure_code 4/s"),
    Line("Unseen, code 4/s", "unseen", "azure_code 4/s", "best-effort tokens/s", "be.tokens_per_s"),
    Line("Unseen, arXiv 2.5/s", "unseen", "arxiv 2.5/s"),
    Line("Unseen, arXiv 2.5/s", "unseen", "arxiv 2.5/s", "best-effort tokens/s", "be.tokens_per_s"),
    Line("`simulate`, 4/s", "simulate", "4/s"),
    Line("AccelGen, 8/s", "accelgen", "8/s", _GOODPUT),
    Line("AccelGen, 8/s", "accelgen", "8/s", _TOKENS, "all.tokens_per_s"),
    Line("BROS, 10/s", "bros", "10/s"),
    Line("ALISE, Alpaca 20/s", "alise", "alpaca 20/s", _LATENCY),
    Line("ALISE, ShareGPT 1.7/s", "alise", "sharegpt 1.7/s", _LATENCY),
)


def told() -> str:
    """Return one point of each experiment by what schedulers are told, means over the seeds."""
    return table(["experiment", "figure", *_KNOWN.values()], map(_row, _LINES))


def _row(line: Line) -> list[str]:
    of = runs("leak").of(part=line.part, point=line.point, policy=_UNION)
    cells = [_cell(of.of(knows=name), line) for name in _KNOWN]
    return [line.experiment, line.said, *cells[:-1], bold(cells[-1])]


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
