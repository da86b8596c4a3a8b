"""Sends a response, whole or as events, once it is stored: a client that has its end can continue it."""

from collections.abc import Awaitable, Callable

import orjson
from typing_extensions import override

from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import Formatter, MakeFormatter
from alignedserve.api.responses.formatter import ResponsesFormatter
from alignedserve.gateway.streaming import BodyResponse, EventStreamResponse

Keep = Callable[[bytes], Awaitable[None]]


class ResponseBody(BodyResponse):
    """A whole response."""

    def __init__(self, generation: Generation, make_formatter: MakeFormatter, keep: Keep) -> None:
        super().__init__(generation, make_formatter)
        self._keep = keep

    @override
    async def _body(self) -> bytes:
        body = await super()._body()
        await self._keep(body)
        return body


class ResponseEvents(EventStreamResponse):
    """A streamed response."""

    def __init__(self, generation: Generation, make_formatter: MakeFormatter, keep: Keep) -> None:
        super().__init__(generation, make_formatter)
        self._keep = keep

    @override
    async def _closing_events(self, formatter: Formatter) -> bytes:
        assert isinstance(formatter, ResponsesFormatter), "a formatter of another API"
        events = formatter.closing_events()
        await self._keep(orjson.dumps(formatter.response))
        return events
