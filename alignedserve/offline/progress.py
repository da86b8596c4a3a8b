"""The line that shows how far a call of the Python API has come."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressLine:
    """A line on stderr while the context lasts; nothing where stderr is not a terminal."""

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("Requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
            transient=True,
            refresh_per_second=4,  # drawing takes time from the computing
        )
        self._task = self._progress.add_task("", total=num_requests, tokens="")
        self._num_tokens = 0

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, num_tokens: int, *, has_ended: bool) -> None:
        """Count new tokens of a request, and the request if it has ended with them."""
        self._num_tokens += num_tokens
        tokens = f"{self._num_tokens} tokens" if self._num_tokens else ""  # embeddings have none
        self._progress.update(self._task, advance=int(has_ended), tokens=tokens)
