"""Tries clients' grammars in processes of their own, before any worker compiles them in its threads."""

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import orjson

from alignedserve.core.errors import ModelError
from alignedserve.process.child_process import ChildProcess
from alignedserve.process.turn_threads import TurnThreads
from alignedserve.runtime.grammar.client_seconds import ClientSeconds
from alignedserve.runtime.grammar.compiler import GrammarError, unsupported_model
from alignedserve.runtime.grammar.json_schema import FLEXIBLE_WHITESPACE, pattern_of_others
from alignedserve.runtime.grammar.trial_process import TrialSetup
from alignedserve.runtime.grammar.vocabulary import TokenTable


class TrialTurn(NamedTuple):
    """Whose turn a grammar waits for: a tenant, and a class of its requests."""

    tenant: str = ""
    is_real_time: bool = True  # somebody waits for the answer


ALONE = TrialTurn()


_MAX_BYTES = 8192
_MAX_DEPTH = 16
_MAX_COUNT = 32  # of items or characters, where a schema bounds them
_GUIDANCE = "x-guidance"
_MAX_WALL_S = 30.0  # where cores are busy with other things, or the process is stopped
logger = logging.getLogger(__name__)


class ClientExhausted(Exception):
    """The client's grammars have taken too long; another is tried later."""


MAX_CPU_S = 2.0  # schemas in use take some milliseconds
_MAX_KEPT = 4096
_TOO_LONG = "the grammar takes too long, or too much memory, to compile"


@dataclass(slots=True, eq=False)
class GrammarTrial:
    """One grammar that is to be tried."""

    grammar: str
    result: "Future[None]" = field(default_factory=Future)
    turns: set[TrialTurn] = field(default_factory=set)  # that it waits for


class TrialLane:
    """A process, and the trials that wait for it: those of real-time requests before those of best effort, which have a
    share of the turns (TurnThreads). Of each class the first of each tenant goes in turn, so that a tenant waits for
    one trial of every other at most, however many they have."""

    def __init__(
        self, attempt: Callable[[str, ChildProcess], None], charge: Callable[[Collection[TrialTurn], float], None]
    ) -> None:
        """`attempt`: tries a grammar in the process, on the lane's thread; what it raises is the trial's error.
        `charge`: gets the seconds that it took."""
        self._charge = charge
        self.process = ChildProcess("alignedserve.runtime.grammar.trial_process", _MAX_WALL_S)
        self._attempt = attempt
        self._thread = TurnThreads(1, "trials")

    def add(self, trial: GrammarTrial, turn: TrialTurn) -> None:
        """Let a trial wait for this turn, too: whichever comes first, it is tried once."""
        if turn in trial.turns:
            return
        trial.turns.add(turn)
        tried = self._thread.submit(partial(self._try, trial), is_real_time=turn.is_real_time, client=turn.tenant)
        tried.add_done_callback(lambda ended: ended.cancelled() and trial.result.cancel())

    def close(self) -> None:
        self._thread.close(waits=False)
        self.process.kill()
        self._thread.close()
        self.process.end()

    def _try(self, trial: GrammarTrial) -> None:
        if trial.result.done() or not trial.result.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        failure: Exception | None = None
        try:
            self._attempt(trial.grammar, self.process)
        except Exception as error:  # noqa: BLE001 - whoever waits for the trial raises it
            failure = error
        self._charge(trial.turns, min(time.monotonic() - began, MAX_CPU_S))
        if failure is None:
            trial.result.set_result(None)
        else:
            trial.result.set_exception(failure)


class GrammarTrials:
    """Tries each grammar once. May be called from any thread. Plain schemas (see `is_plain`) have a process, so that
    none waits for seconds that others' grammars take; all others have another. In each, tenants take turns (see
    `TrialLane`). The processes end with `close`, or with the last reference to this."""

    def __init__(self, load_table: Callable[[], TokenTable], *, max_cpu_s: float = MAX_CPU_S) -> None:
        """`load_table`: called on a thread, when the first grammar comes; may raise ModelError."""
        attempt = partial(_attempt, load_table, max_cpu_s)
        self._plain, self._others = TrialLane(attempt, self._charge), TrialLane(attempt, self._charge)
        self._trials: OrderedDict[bytes, GrammarTrial] = OrderedDict()
        self._clients = ClientSeconds()
        self._lock = Lock()
        for lane in (self._plain, self._others):
            weakref.finalize(self, lane.process.end)

    def start(self, grammar: str, turn: TrialTurn = ALONE) -> "Future[None]":
        """Let a grammar wait for its turn, unless it has been tried. Raises ClientExhausted."""
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            known = self._trials.get(key)
            if known is None or _tells_nothing(known.result):
                if not self._clients.add(turn.tenant, 0.0, time.monotonic()):
                    raise ClientExhausted
                known = self._trials[key] = GrammarTrial(grammar)
            self._trials.move_to_end(key)
            while len(self._trials) > _MAX_KEPT:
                self._trials.popitem(last=False)
            if not known.result.done():
                lane = self._plain if is_plain(grammar) else self._others
                lane.add(known, turn)
            return known.result

    def _charge(self, turns: Collection[TrialTurn], seconds: float) -> None:
        with self._lock:
            for client in {turn.tenant for turn in turns}:
                self._clients.add(client, seconds, time.monotonic())

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
        process.send(msgspec.msgpack.encode(TrialSetup(max_cpu_s, table)))
    answer = process.answer(grammar.encode())
    if answer is None:
        process.end()
        logger.warning("a grammar of %d characters was refused: it took too long to compile", len(grammar))
        raise GrammarError(_TOO_LONG)
    if answer:
        raise GrammarError(answer.decode())


def _tells_nothing(result: "Future[None]") -> bool:
    return result.cancelled() or (result.done() and not isinstance(result.exception(), GrammarError | None))


def is_plain(grammar: str) -> bool:
    if len(grammar) > _MAX_BYTES:
        return False
    try:
        read = orjson.loads(grammar)
    except orjson.JSONDecodeError:
        return False
    parts = read.get("grammars") if isinstance(read, dict) else None
    if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], dict):
        return False
    names = {name for name, value in parts[0].items() if value is not None} - {"name"}
    return names == {"json_schema"} and _is_plain(parts[0]["json_schema"], 0)


def _is_plain(schema: Any, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return False
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and [*patterns] == [pattern_of_others(schema.get("properties", {}))]:  # our own
        schema = {**schema, "patternProperties": True, "additionalProperties": next(iter(patterns.values()))}
    return all(name in _KEYWORDS and _KEYWORDS[name](value, depth + 1) for name, value in schema.items())


def _anything(value: Any, depth: int) -> bool:
    return True


def _each(value: Any, depth: int) -> bool:
    return isinstance(value, list) and all(_is_plain(member, depth) for member in value)


def _named(value: Any, depth: int) -> bool:
    return isinstance(value, dict) and all(_is_plain(member, depth) for member in value.values())


def _small(value: Any, depth: int) -> bool:
    return isinstance(value, int) and value <= _MAX_COUNT


def _own_guidance(value: Any, depth: int) -> bool:
    return isinstance(value, dict) and value.get("whitespace_pattern", FLEXIBLE_WHITESPACE) == FLEXIBLE_WHITESPACE


_KEYWORDS: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(("$schema", "const", "default", "description", "enum", "required", "title", "type"), _anything),
    **dict.fromkeys(("maxItems", "maxLength", "minItems", "minLength"), _small),
    "additionalProperties": _is_plain,
    "anyOf": _each,
    "items": _is_plain,
    "patternProperties": lambda value, depth: value is True,
    "prefixItems": _each,
    "properties": _named,
    _GUIDANCE: _own_guidance,
}
