"""Where the choices of an open call stand: their place in the router's queue, and when they are likely to start."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.request_notes import MAX_STANDINGS, AskStandings, Standing, StandingsTold
from alignedserve.messages.wire import Message

_ANSWER_S = 1.0  # a router that has not answered by then is not waited for
_UNKNOWN = "not known: no router tells of it at this moment"


class StandingQuestions:
    """Asks every connected router; each knows the requests of its deployment."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}
        self._numbers = itertools.count(1)

    async def ask(
        self, request_ids: tuple[RequestId, ...], ask_routers: Callable[[Message], int]
    ) -> dict[RequestId, Standing]:
        """Return the standings that routers tell in time. `ask_routers`: returns how many were asked."""
        number = next(self._numbers)
        question = self._open[number] = _Question(len(request_ids))
        try:
            question.asked(ask_routers(AskStandings(number, request_ids)))
            async with asyncio.timeout(_ANSWER_S):
                await question.is_answered.wait()
        except TimeoutError:
            pass
        finally:
            del self._open[number]
        return question.known

    def told(self, message: StandingsTold) -> None:
        question = self._open.get(message.number)
        if question is not None:
            question.told(message)


class _Question:
    def __init__(self, num_wanted: int) -> None:
        self.known: dict[RequestId, Standing] = {}
        self.is_answered = asyncio.Event()
        self._num_wanted = num_wanted
        self._num_asked: int | None = None
        self._num_answers = 0

    def asked(self, num_routers: int) -> None:
        self._num_asked = num_routers
        self._look()

    def told(self, message: StandingsTold) -> None:
        self.known.update((one.request_id, one) for one in message.standings)
        self._num_answers += 1
        self._look()

    def _look(self) -> None:
        has_all = self._num_asked is not None and self._num_answers >= self._num_asked
        if has_all or len(self.known) >= self._num_wanted:
            self.is_answered.set()


def open_requests(document: Mapping[str, Any]) -> tuple[RequestId, ...]:
    """Return the requests of an explained call that go on; of many the first few, as each looks at the whole queue."""
    return tuple(one["request_id"] for one in document["choices"] if one["output_tokens"] is None)[:MAX_STANDINGS]


def add_standings(document: Mapping[str, Any], known: Mapping[RequestId, Standing]) -> None:
    """Add to each choice of an explained call where it stands; None: it has ended."""
    for choice in document["choices"]:
        is_open = choice["output_tokens"] is None
        choice["standing"] = standing_view(known.get(choice["request_id"])) if is_open else None


def standing_view(standing: Standing | None) -> dict[str, Any]:
    if standing is None:
        return {"stage": None, "where": None, "position": None, "start_in_ms": None, "text": _UNKNOWN}
    num_before = standing.num_before
    return {
        "stage": standing.stage.value,
        "where": standing.where or "router",
        "position": None if num_before is None else num_before + 1,
        "prompt_tokens_before": None if num_before is None else standing.num_tokens_before,
        "start_in_ms": _ms(standing.start_s),
        "latest_start_in_ms": _ms(standing.latest_start_s),
        "text": standing_text(standing),
    }


def standing_text(standing: Standing) -> str:
    where, others = standing.where or "another process", standing.num_others
    match standing.stage:
        case Stage.QUEUED if standing.num_before is None:
            return "about to be queued again; when it starts is not known"
        case Stage.QUEUED:
            return _queued_text(standing)
        case Stage.PREFILLING:
            prompts = f"{others} other prompts of {standing.num_tokens_before} tokens"
            return f"at {where} with {prompts}; its policy chooses every iteration, so when it starts is not known"
        case Stage.POOLED:
            return f"in {where} with {others} others; it starts with a batch of its length, when is not known"
    return f"at {where} with {others} others that run, pause or wait for a place there"


def _queued_text(standing: Standing) -> str:
    position = (standing.num_before or 0) + 1
    place = f"number {position} in the queue, {standing.num_tokens_before} prompt tokens before it"
    if standing.start_s is None:
        return f"{place}; when it starts is not known: nothing has left the queue yet while others waited"
    expected, latest = f"{place}; it is expected to start in {standing.start_s:.1f} s", standing.latest_start_s
    if latest is None or latest <= standing.start_s:
        return expected
    return f"{expected}, by its class's share in {latest:.1f} s if more real-time requests come"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
