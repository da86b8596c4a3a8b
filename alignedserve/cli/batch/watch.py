"""Watching a batch: a progress bar if stderr is a terminal, otherwise a line now and then."""

import asyncio
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from alignedserve.cli.batch.client import BatchClient
from alignedserve.cli.batch.formatting import OVER, Rate, num_ended, num_lines, progress_text

POLL_S = 1.0
_LINE_EVERY_S = 10.0  # without a terminal, unless the status changes


class View(Protocol):
    """Shows a batch and its changes."""

    def __enter__(self) -> Self:
        """Start showing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the screen."""

    def show(self, batch: dict[str, Any]) -> None:
        """Show the batch as it is now."""


class BarView:
    """A progress bar with rate and expected end."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("[bold]{task.description}[/]"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._task: TaskID = self._bar.add_task("", total=None, text="")
        self._rate = Rate()

    def __enter__(self) -> Self:
        """See View."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See View."""
        self._bar.stop()

    def show(self, batch: dict[str, Any]) -> None:
        """See View."""
        self._rate.add(time.monotonic(), num_ended(batch))
        self._bar.update(
            self._task,
            description=str(batch["status"]),
            completed=num_ended(batch),
            total=num_lines(batch) or None,
            text=progress_text(batch, self._rate, time.time()),
        )


class LineView:
    """Plain lines: one for every change of the status, and one now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate = Rate()
        self._last: tuple[str, int] | None = None
        self._printed_s = 0.0

    def __enter__(self) -> Self:
        """See View."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See View."""

    def show(self, batch: dict[str, Any]) -> None:
        """See View."""
        now, seen = time.monotonic(), (str(batch["status"]), num_ended(batch))
        self._rate.add(now, seen[1])
        is_other_status = self._last is None or self._last[0] != seen[0]
        if not is_other_status and (seen == self._last or now - self._printed_s < _LINE_EVERY_S):
            return
        self._last, self._printed_s = seen, now
        count = f" {seen[1]}/{num_lines(batch)}" if num_lines(batch) else ""
        text = progress_text(batch, self._rate, time.time())
        line = f"{time.strftime('%H:%M:%S')} {batch['id']} {seen[0]}{count}{', ' + text if text else ''}"
        self._console.print(line, markup=False, soft_wrap=True)


def make_view(console: Console) -> View:
    """Return the view that suits the console."""
    return BarView(console) if console.is_terminal else LineView(console)


async def watch_until_over(client: BatchClient, batch_id: str, view: View) -> dict[str, Any]:
    """Show the batch until it is over; return it as it is then."""
    while True:
        batch = await client.batch(batch_id)
        view.show(batch)
        if batch["status"] in OVER:
            return batch
        await asyncio.sleep(POLL_S)


class ByteBar:
    """Progress bar of a file in bytes; hidden if stderr is no terminal."""

    def __init__(self, console: Console, label: str, num_bytes: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=num_bytes)

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._bar.stop()

    def update(self, num_bytes: int) -> None:
        """Set the bytes so far."""
        self._bar.update(self._task, completed=num_bytes)
