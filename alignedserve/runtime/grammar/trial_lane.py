"""A process that tries grammars one after the other, and the queue before it, in which tenants take turns."""

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from alignedserve.process.child_process import ChildProcess

_MAX_WALL_S = 30.0  # where cores are busy with other things, or the process is stopped


@dataclass(slots=True, eq=False)
class Trial:
    """One grammar that is to be tried."""

    grammar: str
    result: "Future[None]" = field(default_factory=Future)
    tenants: set[str] = field(default_factory=set)  # that wait for it


class TrialLane:
    """A process, and the trials that wait for it: the first of each tenant in turn, so that a tenant waits for one
    trial of every other at most, however many they have."""

    def __init__(self, attempt: Callable[[str, ChildProcess], None]) -> None:
        """`attempt`: tries a grammar in the process, on the lane's thread; what it raises is the trial's error."""
        self.process = ChildProcess("alignedserve.runtime.grammar.trial_process", _MAX_WALL_S)
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
