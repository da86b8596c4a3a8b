"""Tables of docs/experiments/ablations.md."""

from collections.abc import Callable, Mapping

from experiments.pages.record import Record, bullets, change, count, digits, runs, seconds, share, table

_UNION = "aligned_slo"
_OWN = {"alise": "ALISE", "apt_serve": "Apt-Serve", "bros": "BROS"}
_HELD = {"alise": None, "apt_serve": "all.p99_attainment", "bros": "rt.attainment"}
_NOT_YET = bullets(["Not simulated yet"])


def worth() -> str:
    """Return a row for each system on each load, with its mean time for a token by that of the union, same seeds."""
    record, lines = runs("ablations"), []
    for part, system in dict.fromkeys((row["part"], row["system"]) for row in record.rows):
        at = record.of(part=part, system=system)
        seeds = {row["seed"] for row in at.rows}
        off = Record([row for row in record.of(part=part, system=_UNION).rows if row["seed"] in seeds])
        lines.append([_OWN[part], _shown(system), *_cells(part, at, off)])
    if not lines:
        return _NOT_YET
    heads = ["load of", "system", "s/token", "by the union's", "held", "best-effort tokens/s"]
    return table([*heads, "tokens/s", "longest gap", "completed of sent"], lines)


def _cells(part: str, at: Record, off: Record) -> list[str]:
    latency, held = "all.normalized_s.mean", _HELD[part]
    has_best_effort = all("be.loaded_tokens_per_s" in row for row in at.rows)
    return [
        digits(at.mean(latency)),
        change(at.mean(latency) / off.mean(latency)) if off else "-",
        share(at.mean(held)) if held else "-",
        count(at.mean("be.loaded_tokens_per_s")) if has_best_effort else "-",
        count(at.mean("all.loaded_tokens_per_s")),
        seconds(max(at.values("all.longest_gap_s"))),
        share(at.mean("all.completed_of_arrived")),
    ]


def _shown(system: str) -> str:
    return f"`{system}`" if system == _UNION else system.replace(_UNION, f"`{_UNION}`")


TABLES: Mapping[str, Callable[[], str]] = {"worth": worth}
