"""Batches as text: for a status line, a progress bar, a table."""

import re
import time
from collections import deque
from datetime import datetime
from typing import Any

from rich.table import Table

from alignedserve.cli.console import printable

OVER = frozenset({"completed", "failed", "expired", "cancelled"})
_RATE_WINDOW_S = 30.0
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)  # as a server tells until when a batch waits
_VERDICTS = {"fits": "fits", "at_risk": "at risk", "cannot_fit": "cannot fit"}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Rate:
    """Lines per second over the last half minute."""

    def __init__(self) -> None:
        self._observations: deque[tuple[float, int]] = deque()

    def add(self, now: float, num_ended: int) -> None:
        self._observations.append((now, num_ended))
        while len(self._observations) > 2 and now - self._observations[0][0] > _RATE_WINDOW_S:
            self._observations.popleft()

    @property
    def per_s(self) -> float | None:
        (first_s, first), (last_s, last) = self._observations[0], self._observations[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None


def num_ended(batch: dict[str, Any]) -> int:
    counts = batch.get("request_counts") or {}
    return int(counts.get("completed", 0)) + int(counts.get("failed", 0))


def num_lines(batch: dict[str, Any]) -> int:
    return int((batch.get("request_counts") or {}).get("total", 0))


def outlook(batch: dict[str, Any], now: float) -> str:
    """Format expected end and slack, or the reason of a pause; empty for a server that does not report them."""
    extension = batch.get("alignedserve") or {}
    if extension.get("paused"):
        reason = _MOMENT.sub(_as_clock, printable(str(extension["paused"])))
        return reason if reason.startswith(("paused", "waits")) else f"paused: {reason}"
    quote = extension.get("quote")
    if not quote or batch["status"] in OVER:
        return ""
    finish_s, slack_s = float(quote["expected_at"]), float(quote["slack_s"])
    slack = f"slack {duration(slack_s)}" if slack_s >= 0 else f"{duration(-slack_s)} too late"
    verdict = _VERDICTS.get(quote["verdict"], printable(str(quote["verdict"])))
    fitting = f", a window of {printable(quote['fitting_window'])} fits" if quote.get("fitting_window") else ""
    return f"{verdict}, ends {clock(finish_s)} (in {duration(finish_s - now)}), {slack}{fitting}"


def progress_text(batch: dict[str, Any], rate: Rate, now: float) -> str:
    parts = []
    if batch["status"] == "validating":
        parts.append(f"{(batch.get('alignedserve') or {}).get('lines_validated', 0)} lines read")
    failed = int((batch.get("request_counts") or {}).get("failed", 0))
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{rate.per_s:.1f} lines/s"] if rate.per_s is not None and batch["status"] not in OVER else []
    parts += [text] if (text := outlook(batch, now)) else []
    return ", ".join(parts)


def summary(batch: dict[str, Any], now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    counts = batch.get("request_counts") or {}
    rows = [("batch", batch["id"]), ("status", batch["status"])]
    if counts.get("total"):
        rows.append(("lines", f"{counts['completed']} of {counts['total']} completed, {counts['failed']} failed"))
    rows += [("outlook", text)] if (text := outlook(batch, now)) else []
    usage = batch.get("usage") or {}
    if usage.get("total_tokens"):
        cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
        shown = f"{usage['input_tokens']} in{f' ({cached} cached)' if cached else ''}"
        rows.append(("tokens", f"{shown}, {usage['output_tokens']} out"))
    extension = batch.get("alignedserve") or {}
    if extension.get("compute_seconds"):
        rows.append(("computed", f"{extension['compute_seconds']:,.3f} s"))
    if extension.get("not_before"):
        rows.append(("not before", clock(extension["not_before"])))
    rows += [("hours", extension["hours"])] if extension.get("hours") else []
    rows += [("priority", str(extension["priority"]))] if extension.get("priority") else []
    rows.append(("created", clock(batch["created_at"])))
    rows += [(name.replace("_", " "), clock(batch[f"{name}_at"])) for name in _TIMES if batch.get(f"{name}_at")]
    if batch.get("expires_at") and batch["status"] not in OVER:
        rows.append(("window", f"{batch['completion_window']}, until {clock(batch['expires_at'])}"))
    rows += [
        (f"{name} file", batch[key]) for name in ("input", "output", "error") if batch.get(key := f"{name}_file_id")
    ]
    if batch.get("metadata"):
        rows.append(("metadata", ", ".join(f"{name}={value}" for name, value in batch["metadata"].items())))
    for name, value in rows:
        table.add_row(name, printable(str(value)))
    return table


def batches_table(batches: list[dict[str, Any]], now: float) -> Table:
    table = Table(header_style="bold")
    for heading in ("batch", "status", "lines", "failed", "created", "window", "outlook"):
        table.add_column(heading, justify="right" if heading in ("lines", "failed") else "left", no_wrap=True)
    for batch in batches:
        counts = batch.get("request_counts") or {}
        table.add_row(
            str(batch["id"]),
            str(batch["status"]),
            f"{num_ended(batch)}/{num_lines(batch)}" if num_lines(batch) else "",
            str(counts.get("failed") or ""),
            clock(batch["created_at"]),
            str(batch["completion_window"]),
            outlook(batch, now).partition(",")[0],
        )
    return table


def problem_text(problem: dict[str, Any]) -> str:
    prefix = f"line {problem['line']}: " if problem.get("line") is not None else ""
    return printable(f"{prefix}{problem.get('message')} ({problem.get('code')})")


def clock(unix_s: float) -> str:
    then, today = time.localtime(unix_s), time.localtime()
    shape = "%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M"
    return time.strftime(shape, then)


def _as_clock(match: re.Match[str]) -> str:
    try:
        return clock(datetime.fromisoformat(match[0]).timestamp())
    except ValueError:  # no such day
        return match[0]


def duration(seconds: float) -> str:
    total = max(0, round(seconds))
    days, hours, minutes = total // 86_400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {total % 60} s" if minutes else f"{total} s"
