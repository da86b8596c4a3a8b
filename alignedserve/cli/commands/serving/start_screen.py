"""The terminal while a cluster starts: the sizes chosen, and how much of the model is loaded."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from alignedserve.cli.console import notes
from alignedserve.cluster.sizing import SizeChoice
from alignedserve.config.sections import MIB
from alignedserve.process import loading_progress
from alignedserve.runtime.device_check.choice import DeviceChoice

_GIB = 1024 * MIB
_FIRST_ESTIMATE_S = 1.0  # of loading; earlier ones jump


class StartScreen:
    """A StartObserver on stderr, used as a context manager. Only the sizes are written where that is no terminal."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or notes()
        self._clock = clock
        self._began_s: float | None = None  # loading
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),  # the whole line fits in 80 columns
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

    def stopping(self) -> None:
        self._bar.tasks[0].total = None
        self._bar.update(self._task, description="Stopping …", done="")

    def device_chosen(self, choice: DeviceChoice) -> None:
        if choice.remark:
            self._console.print(
                f"{'WARNING: ' if choice.is_warning else ''}{choice.remark}", markup=False, soft_wrap=True
            )

    def sizes_chosen(self, choice: SizeChoice, *, has_others: bool = False) -> None:
        self._console.print(choice.line(names_model=has_others), markup=False, soft_wrap=True)
        for warning in choice.remarks(names_model=has_others):
            self._console.print(f"warning: {warning}", markup=False, soft_wrap=True)

    def model_loading(self, progress: loading_progress.LoadedShare) -> None:
        if not progress.total_bytes:
            return
        if self._began_s is None:
            self._began_s = self._clock()
        if progress.read_bytes == progress.total_bytes:
            # Without a total, as a finished bar would stand still until the workers answer; `update` takes no None.
            self._bar.tasks[0].total = None
            self._bar.update(self._task, description="Warming up …", done=_amount(progress))
            return
        done = _amount(progress) + _left(progress, self._clock() - self._began_s)
        total, completed = progress.total_bytes, progress.read_bytes
        self._bar.update(self._task, description="Loading …", total=total, completed=completed, done=done)


def _amount(progress: loading_progress.LoadedShare) -> str:
    unit, name, digits = (_GIB, "GiB", 1) if progress.total_bytes >= 10 * _GIB else (MIB, "MiB", 0)
    read, total = (f"{size / unit:.{digits}f}" for size in (progress.read_bytes, progress.total_bytes))
    return f"{read} of {total} {name}, {progress.num_layers} of {progress.total_layers} layers"


def _left(progress: loading_progress.LoadedShare, elapsed_s: float) -> str:
    if not progress.read_bytes or elapsed_s < _FIRST_ESTIMATE_S:
        return ""
    left_s = elapsed_s * (progress.total_bytes - progress.read_bytes) / progress.read_bytes
    return f", {left_s:.0f} s left"
