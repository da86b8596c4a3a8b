"""How a batch is watched: a bar where stderr is a terminal, a line now and then where it is not."""

import asyncio
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from alignedserve.cli.batch.client import BatchClient
from alignedserve.cli.batch.formatting import OVER, Rate, num_ended, num_lines, progress_words

POLL_S = 1.0
_LINE_EVERY_S = 10.0  # without a terminal, unless the status changes


class View(Protocol):
    """Somewhere to show a batch."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the screen as it should be."""

    def show(self, batch: dict[str, Any]) -> None:
        """The batch as it is now."""


class BarView:
    """A bar, the rate, the expected end."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("[bold]{task.description}[/]"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}", markup=False),
        )
        self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._task: TaskID = self._bar.add_task("", total=None, words="")
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
        self._rate.note(time.monotonic(), num_ended(batch))
        self._bar.update(
            self._task,
            description=str(batch["status"]),
            completed=num_ended(batch),
            total=num_lines(batch) or None,
            words=progress_words(batch, self._rate, time.time()),
        )


class LineView:
    """Plain lines: one for every change of the status, and one now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate = Rate()
        self._last: tuple[str, int] | None = None
        self._said_s = 0.0

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
        self._rate.note(now, seen[1])
        is_other_status = self._last is None or self._last[0] != seen[0]
        if not is_other_status and (seen == self._last or now - self._said_s < _LINE_EVERY_S):
            return
        self._last, self._said_s = seen, now
        count = f" {seen[1]}/{num_lines(batch)}" if num_lines(batch) else ""
        words = progress_words(batch, self._rate, time.time())
        line = f"{time.strftime('%H:%M:%S')} {batch['id']} {seen[0]}{count}{', ' + words if words else ''}"
        self._console.print(line, markup=False, soft_wrap=True)


def view_of(console: Console) -> View:
    """What suits this console."""
    return BarView(console) if console.is_terminal else LineView(console)


async def watch(client: BatchClient, batch_id: str, view: View) -> dict[str, Any]:
    """Until the batch is over; the batch as it then is."""
    while True:
        batch = await client.batch(batch_id)
        view.show(batch)
        if batch["status"] in OVER:
            return batch
        await asyncio.sleep(POLL_S)


class ByteBar:
    """Progress through a file; nothing where stderr is no terminal."""

    def __init__(self, console: Console, what: str, num_bytes: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=num_bytes)

    def __enter__(self) -> Self:
        """Show it."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away."""
        self._bar.stop()

    def note(self, num_bytes: int) -> None:
        """So far."""
        self._bar.update(self._task, completed=num_bytes)
