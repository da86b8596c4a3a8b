"""Tables of docs/experiments/unseen.md."""

from collections.abc import Callable, Mapping

from experiments.pages.record import Record, bold, bold_best, count, runs, seconds, share, table

_WAITING = "bros, long prompts wait"
_POLICIES = ("fcfs", "sarathi", "bros", _WAITING, "accelgen", "alise", "apt_serve", "aligned_slo")
_UNION = "aligned_slo"
_POINTS = {
    "code 1.5/s": ("azure_code", 1.5),
    "code 4/s": ("azure_code", 4.0),
    "Mooncake 0.25/s": ("mooncake", 0.25),
    "Mooncake 0.5/s": ("mooncake", 0.5),
    "arXiv 1/s": ("arxiv", 1.0),
    "arXiv 2.5/s": ("arxiv", 2.5),
}
_HELD, _BEST_EFFORT, _GOODPUT = "rt.attainment", "be.tokens_per_s", "rt.goodput_per_s"


def _column(point: str) -> list[Record]:
    trace, rate = _POINTS[point]
    mixed = runs("unseen").of(part="mixed", trace=trace, rate=rate)
    return [mixed.of(policy=policy) for policy in _POLICIES]


def _by_policy(title: str, cells: Callable[[list[Record]], list[str]]) -> str:
    columns = [cells(_column(point)) for point in _POINTS]
    names = [bold(name) if name == _UNION else name for name in _POLICIES]
    return table([title, *_POINTS], zip(names, *columns, strict=True))


def held() -> str:
    def cells(policies: list[Record]) -> list[str]:
        held = [one.mean(_HELD) for one in policies]
        best = bold_best([share(value) if value > 0.99 else share(value, 0) for value in held], held)
        return [f"{cell}; {seconds(one.mean('rt.tbt_s.p99'))}" for cell, one in zip(best, policies, strict=True)]

    return _by_policy("held; p99 TBT", cells)


def throughput() -> str:
    def cells(policies: list[Record]) -> list[str]:
        tokens, requests = ([one.mean(name) for one in policies] for name in (_BEST_EFFORT, _GOODPUT))
        few, rare = max(tokens) < 100, max(requests) < 0.5
        first = bold_best([f"{value:.1f}" if few else count(value) for value in tokens], tokens)
        second = bold_best([f"{value:.3f}" if rare else f"{value:.2f}" for value in requests], requests)
        return [f"{one}; {other}" for one, other in zip(first, second, strict=True)]

    return _by_policy("best-effort tokens/s; real-time requests within objectives per second", cells)


TABLES: Mapping[str, Callable[[], str]] = {
    "held": held,
    "throughput": throughput,
}
