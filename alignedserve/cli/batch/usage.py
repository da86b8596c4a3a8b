"""`alignedserve usage`: what keys used, from any gateway, as a table, CSV or JSON."""

import csv
import sys
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

from rich.console import Console
from rich.table import Table

from alignedserve.cli.batch.client import BatchClient, print_json, run_with_client
from alignedserve.cli.console import print_table, printable
from alignedserve.core.errors import ConfigError
from alignedserve.usage.records import GROUPS

_COUNTS = {
    "requests": "num_model_requests",
    "input tokens": "input_tokens",
    "cached tokens": "input_cached_tokens",
    "output tokens": "output_tokens",
    "compute seconds": "compute_seconds",
}
_WIDTHS = {"hour": "1h", "day": "1d"}
_DEFAULT_DAYS = 30


class UsageQuestion(NamedTuple):
    """Options of the command, as given."""

    by: str
    since: str | None
    until: str | None
    is_csv: bool
    is_json: bool


def show_usage(url: str, question: UsageQuestion) -> int:
    columns = [name.strip() for name in question.by.split(",") if name.strip()]
    known = [*GROUPS, *_WIDTHS]
    for name in columns:
        if name not in known:
            raise ConfigError(f"--by {name}: must be some of {', '.join(known)}")
    if "hour" in columns and "day" in columns:
        raise ConfigError("--by: either hour or day")
    now = time.time()
    start_s = int(now - _DEFAULT_DAYS * 86_400) if question.since is None else _unix_s("--since", question.since)
    end_s = int(now) + 1 if question.until is None else _unix_s("--until", question.until)
    if end_s <= start_s:
        raise ConfigError("--until must be after --since" if question.until else "--since must be in the past")
    width = next((_WIDTHS[column] for column in columns if column in _WIDTHS), "1h")

    async def act(client: BatchClient, _: Console) -> int:
        pages = await _pages(client, start_s, end_s, width, [column for column in columns if column in GROUPS])
        rows = _summed(pages, columns)
        if question.is_json:
            print_json([dict(zip([*columns, *_COUNTS.values()], row, strict=True)) for row in rows])
        elif question.is_csv:
            csv.writer(sys.stdout).writerows([[*columns, *_COUNTS.values()], *rows])
        else:
            print_table(_table(columns, rows))
        return 0

    return run_with_client(url, act)


async def _pages(client: BatchClient, start_s: int, end_s: int, width: str, by: list[str]) -> list[dict[str, Any]]:
    buckets: list[dict[str, Any]] = []
    while True:
        query = {
            "start_time": start_s,
            "end_time": end_s,
            "bucket_width": width,
            "group_by": ",".join(by),
            "limit": 744,
        }
        page = await client.usage(urlencode(query))
        buckets += page["data"]
        if not page.get("has_more"):
            return buckets
        start_s = int(page["next_page"])


def _summed(buckets: list[dict[str, Any]], columns: list[str]) -> list[list[Any]]:
    sums: dict[tuple[str, ...], list[float]] = {}
    for bucket in buckets:
        began = datetime.fromtimestamp(bucket["start_time"], UTC)
        times = {"hour": began.strftime("%Y-%m-%dT%H:%MZ"), "day": began.strftime("%Y-%m-%d")}
        for result in bucket["results"]:
            group = tuple(str(times.get(column) or result[column]) for column in columns)
            counts = sums.setdefault(group, [0] * len(_COUNTS))
            added = [result.get(name, 0) for name in _COUNTS.values()]  # of an older server some may be missing
            sums[group] = [round(known + more, 6) for known, more in zip(counts, added, strict=True)]
    return [[*group, *counts] for group, counts in sorted(sums.items())]


def _table(columns: list[str], rows: list[list[Any]]) -> Table:
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column)
    for heading in _COUNTS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(printable(value) if isinstance(value, str) else _shown(value) for value in row))
    return table


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _unix_s(option: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} {text}: must be a day or a time, such as 2026-11-01 or 2026-11-01T22:00Z"
        ) from None
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())
