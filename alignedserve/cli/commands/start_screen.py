"""The terminal while a cluster starts: the sizes chosen, and how much of the model is loaded."""

from types import TracebackType

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from alignedserve.cli.console import notes
from alignedserve.cluster.sizing import SizeChoice
from alignedserve.config.sections import MIB
from alignedserve.runtime.process import loading_progress


class StartScreen:
    """A StartObserver on stderr, used as a context manager. Only the sizes are written where that is no terminal."""

    def __init__(self) -> None:
        self._console = notes()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
            refresh_per_second=4,  # drawing costs CPU that the loading needs
        )
        self._task = self._bar.add_task("Starting the cluster …", total=None, done="")

    def __enter__(self) -> "StartScreen":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def sizes_chosen(self, choice: SizeChoice) -> None:
        """Print the choice, and what it costs the user."""
        self._console.print(choice.line, markup=False, soft_wrap=True)
        for warning in choice.warnings:
            self._console.print(f"warning: {warning}", markup=False, soft_wrap=True)

    def model_loading(self, progress: loading_progress.Progress) -> None:
        """Draw the part of the model that all workers together have read."""
        if not progress.total_bytes:
            return
        is_loaded = progress.read_bytes == progress.total_bytes
        self._bar.update(
            self._task,
            description="Warming up …" if is_loaded else "Loading the model …",
            total=progress.total_bytes,
            completed=progress.read_bytes,
            done=f"{progress.read_bytes // MIB} of {progress.total_bytes // MIB} MiB, "
            f"{progress.num_layers} of {progress.total_layers} layers",
        )
