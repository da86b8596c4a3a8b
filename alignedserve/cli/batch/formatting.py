"""A batch in words: for a line that is printed, for a bar that moves, for a table."""

import time
from collections import deque
from typing import Any

from rich.table import Table

from alignedserve.cli.console import printable

OVER = frozenset({"completed", "failed", "expired", "cancelled"})
_RATE_WINDOW_S = 30.0
_VERDICTS = {"fits": "fits", "at_risk": "at risk", "cannot_fit": "cannot fit"}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Rate:
    """Lines per second, of the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now: float, num_ended: int) -> None:
        """So many lines have ended by now."""
        self._seen.append((now, num_ended))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """None before there is anything to tell it from."""
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None


def num_ended(batch: dict[str, Any]) -> int:
    """Lines that have their record."""
    counts = batch.get("request_counts") or {}
    return int(counts.get("completed", 0)) + int(counts.get("failed", 0))


def num_lines(batch: dict[str, Any]) -> int:
    """Of the whole file; 0 until it was read."""
    return int((batch.get("request_counts") or {}).get("total", 0))


def outlook(batch: dict[str, Any], now: float) -> str:
    """When it will end and what time that leaves; why nothing moves; empty for a server that does not say."""
    extension = batch.get("alignedserve") or {}
    if extension.get("paused"):
        return f"paused: {printable(str(extension['paused']))}"
    quote = extension.get("quote")
    if not quote or batch["status"] in OVER:
        return ""
    finish_s, slack_s = float(quote["expected_at"]), float(quote["slack_s"])
    slack = f"slack {duration(slack_s)}" if slack_s >= 0 else f"{duration(-slack_s)} too late"
    verdict = _VERDICTS.get(quote["verdict"], printable(str(quote["verdict"])))
    return f"{verdict}, ends {clock(finish_s)} (in {duration(finish_s - now)}), {slack}"


def progress_words(batch: dict[str, Any], rate: Rate, now: float) -> str:
    """What stands beside the bar, or in a line without one."""
    words = []
    if batch["status"] == "validating":
        words.append(f"{(batch.get('alignedserve') or {}).get('lines_validated', 0)} lines read")
    failed = int((batch.get("request_counts") or {}).get("failed", 0))
    words += [f"{failed} failed"] if failed else []
    words += [f"{rate.per_s:.1f} lines/s"] if rate.per_s is not None and batch["status"] not in OVER else []
    words += [text] if (text := outlook(batch, now)) else []
    return ", ".join(words)


def summary(batch: dict[str, Any], now: float) -> Table:
    """A batch as a table of two columns."""
    table = Table.grid(padding=(0, 2))
    counts = batch.get("request_counts") or {}
    rows = [("batch", batch["id"]), ("status", batch["status"])]
    if counts.get("total"):
        rows.append(("lines", f"{counts['completed']} of {counts['total']} completed, {counts['failed']} failed"))
    rows += [("outlook", text)] if (text := outlook(batch, now)) else []
    usage = batch.get("usage") or {}
    if usage.get("total_tokens"):
        rows.append(("tokens", f"{usage['input_tokens']} in, {usage['output_tokens']} out"))
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


def clock(unix_s: float) -> str:
    """Local time, with its day where that is another one."""
    then, today = time.localtime(unix_s), time.localtime()
    shape = "%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M"
    return time.strftime(shape, then)


def duration(seconds: float) -> str:
    """Two units at most."""
    total = max(0, round(seconds))
    days, hours, minutes = total // 86_400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {total % 60} s" if minutes else f"{total} s"
