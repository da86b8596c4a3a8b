"""Questions for timelines to other gateways, and theirs to this one, by way of a router."""

import asyncio
import itertools
import time
from collections.abc import Callable

import orjson

from alignedserve.api.errors import Unavailable
from alignedserve.api.timelines.explanation import StandingQuestions, add_standings, explanation_json, open_requests
from alignedserve.api.timelines.timeline import Timelines
from alignedserve.messages.request_notes import AskTimeline, StandingsTold, TimelineTold
from alignedserve.messages.wire import Message

_ANSWER_S = 2.0  # gateways that have not answered by then are taken to have nothing
_MAX_OPEN = 64  # questions at a time; others wait


class _Question:
    def __init__(self) -> None:
        self.num_asked: int | None = None  # None: the router has not said yet
        self.num_answers = 0
        self.found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def told(self, message: TimelineTold) -> None:
        if message.num_asked is not None:
            self.num_asked = message.num_asked
        else:
            self.num_answers += 1
        is_last = self.num_asked is not None and self.num_answers >= self.num_asked
        if (message.document or is_last) and not self.found.done():
            self.found.set_result(message.document)


class TimelineQuestions:
    """Asks and answers for one gateway. Until `connect` it knows of no other."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self._gateway = "gateway"
        self._ask_router: Callable[[Message], bool] | None = None
        self._ask_routers: Callable[[Message], int] = _ask_nobody
        self._standings = StandingQuestions()
        self._open: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._places = asyncio.Semaphore(_MAX_OPEN)

    def connect(
        self, gateway: str, ask_router: Callable[[Message], bool], ask_routers: Callable[[Message], int]
    ) -> None:
        """Begin to ask others, by the name of this gateway.

        `ask_router`: one that is connected; False: there is none. `ask_routers`: all of them; returns how many."""
        self._gateway, self._ask_router, self._ask_routers = gateway, ask_router, ask_routers

    async def explain(self, wanted: str, owner: str) -> bytes | None:
        """Return the explanation of a call (JSON), of this gateway or of another; None: nobody has it. With where its
        choices stand at this moment. Raises Unavailable where others cannot be asked."""
        explanation = await self._find(wanted, owner)
        if explanation is None:
            return None
        document = orjson.loads(explanation)
        request_ids = open_requests(document)
        async with self._places:
            known = await self._standings.ask(request_ids, self._ask_routers) if request_ids else {}
        add_standings(document, known)
        return orjson.dumps(document)

    async def _find(self, wanted: str, owner: str) -> bytes | None:
        explanation = self._own(wanted, owner)
        if explanation is not None or self._ask_router is None:
            return explanation
        async with self._places:
            return await self._ask(wanted, owner, self._ask_router)

    def answer(self, message: AskTimeline) -> TimelineTold:
        return TimelineTold(message.number, message.asker, self._own(message.wanted, message.owner) or b"")

    def told(self, message: TimelineTold) -> None:
        question = self._open.get(message.number)
        if question is not None:
            question.told(message)

    def told_standings(self, message: StandingsTold) -> None:
        self._standings.told(message)

    def _own(self, wanted: str, owner: str) -> bytes | None:
        timeline = self._timelines.find(wanted, owner)
        return None if timeline is None else explanation_json(timeline, self._gateway, time.monotonic())

    async def _ask(self, wanted: str, owner: str, ask_router: Callable[[Message], bool]) -> bytes | None:
        number = next(self._numbers)
        question = self._open[number] = _Question()
        try:
            if not ask_router(AskTimeline(number, self._gateway, wanted, owner)):
                raise Unavailable("No router is connected, by way of which other gateways could be asked.")
            async with asyncio.timeout(_ANSWER_S):
                return await question.found or None
        except TimeoutError:
            return None
        finally:
            del self._open[number]


def _ask_nobody(message: Message) -> int:
    return 0
