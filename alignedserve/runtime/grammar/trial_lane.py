"""A process that tries grammars one after the other, and the queue before it, in which tenants take turns."""

import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Timer
from typing import IO

import msgspec

from alignedserve.runtime.grammar.trial_process import read_frame, write_frame
from alignedserve.runtime.grammar.vocabulary import TokenTable

_MAX_WALL_S = 30.0  # where cores are busy with other things, or the process is stopped
_START = "import sys; sys.path[:] = sys.argv[1:-1]; from alignedserve.runtime.grammar.trial_process import main; main()"


@dataclass(slots=True, eq=False)
class Trial:
    """One grammar that is to be tried."""

    grammar: str
    result: "Future[None]" = field(default_factory=Future)
    tenants: set[str] = field(default_factory=set)  # that wait for it


class TrialLane:
    """A process, and the trials that wait for it: the first of each tenant in turn, so that a tenant waits for one
    trial of every other at most, however many they have."""

    def __init__(self, max_cpu_s: float, attempt: "Callable[[str, TrialProcess], None]") -> None:
        """`attempt`: tries a grammar in the process, on the lane's thread; what it raises is the trial's error."""
        self.process = TrialProcess(max_cpu_s)
        self._attempt = attempt
        self._thread = ThreadPoolExecutor(1, "trials")
        self._waiting: OrderedDict[str, deque[Trial]] = OrderedDict()  # the tenant whose turn is next first
        self._lock = Lock()

    def add(self, trial: Trial, tenant: str) -> None:
        """Let a trial wait in the tenant's place, too: whichever turn comes first, it is tried once."""
        with self._lock:
            if tenant in trial.tenants:
                return
            trial.tenants.add(tenant)
            self._waiting.setdefault(tenant, deque()).append(trial)
            self._thread.submit(self._try_next)

    def close(self) -> None:
        """End the process at once; trials that wait are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.process.kill()
        self._thread.shutdown()
        self.process.end()
        for trials in self._waiting.values():
            for trial in trials:
                trial.result.cancel()

    def _try_next(self) -> None:
        with self._lock:
            tenant, trials = next(iter(self._waiting.items()))
            trial = trials.popleft()
            if trials:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
        if trial.result.done() or not trial.result.set_running_or_notify_cancel():
            return
        try:
            self._attempt(trial.grammar, self.process)
        except Exception as error:  # noqa: BLE001 - whoever waits for the trial raises it
            trial.result.set_exception(error)
        else:
            trial.result.set_result(None)


class TrialProcess:
    """The process, while it runs. Used by one thread at a time."""

    def __init__(self, max_cpu_s: float) -> None:
        self._max_cpu_s = max_cpu_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, load_table: Callable[[], TokenTable]) -> None:
        """Start it, unless it runs. Raises ModelError as `load_table` does."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        table = msgspec.msgpack.encode(load_table())
        command = [sys.executable, "-c", _START, *sys.path, str(self._max_cpu_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        with suppress(OSError):  # the first answer will tell
            write_frame(self._stream(self._process.stdin), table)

    def answer(self, grammar: bytes) -> bytes | None:
        """Return the answer; None: the process has ended over this grammar."""
        assert self._process is not None, "a process that was started"
        timer = Timer(_MAX_WALL_S, self._process.kill)
        timer.start()
        try:
            write_frame(self._stream(self._process.stdin), grammar)
            return read_frame(self._stream(self._process.stdout))
        except OSError:
            return None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kill it, if it runs: what waits for an answer has none. From any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """End it, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with suppress(OSError), process:  # closes the pipes, and waits
            pass

    @staticmethod
    def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "a process with pipes"
        return pipe
