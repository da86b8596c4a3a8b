"""Tries clients' grammars in processes of their own, before any worker compiles them in its threads."""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from threading import Lock

import msgspec

from alignedserve.core.errors import ModelError
from alignedserve.process.child_process import ChildProcess
from alignedserve.runtime.grammar.compiler import GrammarError, unsupported_model
from alignedserve.runtime.grammar.plain_schemas import is_plain
from alignedserve.runtime.grammar.trial_lane import Trial, TrialLane
from alignedserve.runtime.grammar.trial_process import Setup
from alignedserve.runtime.grammar.vocabulary import TokenTable

logger = logging.getLogger(__name__)

MAX_CPU_S = 2.0  # schemas in use take some milliseconds
_MAX_KEPT = 4096
_TOO_LONG = "the grammar takes too long, or too much memory, to compile"


class GrammarTrials:
    """Tries each grammar once. May be called from any thread.

    Plain schemas (plain_schemas.py) have a process, so that none waits for seconds that others' grammars take; all
    others have another. In each, tenants take turns (trial_lane.py). The processes end with `close`, or with the last
    reference to this.
    """

    def __init__(self, load_table: Callable[[], TokenTable], *, max_cpu_s: float = MAX_CPU_S) -> None:
        """`load_table`: called on a thread, when the first grammar comes; may raise ModelError."""
        attempt = partial(_attempt, load_table, max_cpu_s)
        self._plain, self._others = TrialLane(attempt), TrialLane(attempt)
        self._trials: OrderedDict[bytes, Trial] = OrderedDict()
        self._lock = Lock()
        for lane in (self._plain, self._others):
            weakref.finalize(self, lane.process.end)

    def start(self, grammar: str, tenant: str = "") -> "Future[None]":
        """Begin to try a tenant's grammar; the error of the result is a GrammarError."""
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            known = self._trials.get(key)
            if known is None or _tells_nothing(known.result):
                known = self._trials[key] = Trial(grammar)
            self._trials.move_to_end(key)
            while len(self._trials) > _MAX_KEPT:
                self._trials.popitem(last=False)
            if not known.result.done():
                lane = self._plain if is_plain(grammar) else self._others
                lane.add(known, tenant)
            return known.result

    def close(self) -> None:
        """End the processes at once; grammars that wait are not tried."""
        for lane in (self._plain, self._others):
            lane.close()


def _attempt(load_table: Callable[[], TokenTable], max_cpu_s: float, grammar: str, process: ChildProcess) -> None:
    if not process.is_running:
        try:
            table = load_table()
        except ModelError as error:
            raise unsupported_model(error) from error
        process.start()
        process.send(msgspec.msgpack.encode(Setup(max_cpu_s, table)))
    answer = process.answer(grammar.encode())
    if answer is None:
        process.end()
        logger.warning("a grammar of %d characters was refused: it took too long to compile", len(grammar))
        raise GrammarError(_TOO_LONG)
    if answer:
        raise GrammarError(answer.decode())


def _tells_nothing(result: "Future[None]") -> bool:
    """Return whether a grammar was not tried after all, as where no process could be started."""
    return result.cancelled() or (result.done() and not isinstance(result.exception(), GrammarError | None))
