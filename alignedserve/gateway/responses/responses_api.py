"""The Responses API on behalf of one client: what routes call around generating a response."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import orjson

from alignedserve.api.errors import Conflict, NotFound
from alignedserve.api.responses.bodies import CreateResponseRequest, ResponseFields
from alignedserve.api.responses.formatter import write_first_events
from alignedserve.api.responses.items import Item, parse_items
from alignedserve.api.responses.request_builder import (
    PREVIOUS,
    Context,
    ResponseState,
    check_storable,
    items_of,
    load_context,
    new_response_id,
    output_of,
    raw_json,
    resolve_references,
)
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import WorkLanes, rough_length
from alignedserve.batches.records import BatchKey
from alignedserve.batches.responses.response_repository import (
    EventLimits,
    EventLog,
    StoredConversation,
    StoredResponse,
    fits,
)
from alignedserve.core.errors import InvalidRequest, StoreFull, StoreUnavailable
from alignedserve.gateway.responses.background import BackgroundJobs, cancelled, too_large, without_room
from alignedserve.gateway.responses.conversations import (
    Conversations,
    check_has_room,
    check_unlocked,
    conversation_items,
)
from alignedserve.gateway.services import Services

ResultT = TypeVar("ResultT")

_RETURNS_S = 60.0  # as a router's next one
_PAUSE_S = 0.2


class StoreLoss:
    """A store that may be away. Calls that may be repeated are, until it has been away for too long.

    A full disk is told to the client at once: nobody knows when it ends.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # None: it is there

    def is_over(self) -> None:
        self._since_s = None

    async def wait(self, error: StoreUnavailable) -> None:
        """Pause before the next attempt. Raises the error of the last one after too many, and that of a full disk."""
        if isinstance(error, StoreFull):
            raise error
        now = asyncio.get_running_loop().time()
        self._since_s = now if self._since_s is None else self._since_s
        if now - self._since_s >= _RETURNS_S:
            raise error
        await asyncio.sleep(_PAUSE_S)


async def outlast(call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Return what a call returns that may be repeated, once the store is there. Raises StoreUnavailable after long."""
    loss = StoreLoss()
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            await loss.wait(error)


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A response to be generated: its input, and the items before."""

    response_id: str
    items: list[Item]  # of its own input
    context: Context
    is_stored: bool = False
    conversation_id: str | None = None  # that its items are added to

    @property
    def all_items(self) -> list[Item]:
        return [*self.context.items, *self.items]


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """Operations on stored responses. Every method raises StoreUnavailable while the store is down."""

    state: ResponseState | None  # None: responses are not stored here, like the next
    jobs: BackgroundJobs | None
    conversations: Conversations | None
    lanes: WorkLanes

    @classmethod
    def of(cls, services: Services, owner: str) -> "ResponsesApi":
        files_api, config = services.files_api, services.config
        if files_api is None:
            return cls(None, None, None, services.lanes)
        state = ResponseState(files_api.stores.responses.responses, config, owner)
        jobs = BackgroundJobs(files_api, owner, config.response_lifetime_s)
        conversations = Conversations(files_api.stores.responses.conversations, config, owner)
        return cls(state, jobs, conversations, services.lanes)

    async def begin(self, asked: ResponseFields, ignored: IgnoredFields | None) -> ResponseTurn:
        """Return the turn that a client asks for. Raises InvalidRequest, NotFound."""
        response_id, context = new_response_id(), Context([])
        if asked.previous_response_id is not None:
            previous = await self._find(asked.previous_response_id, PREVIOUS)
            context = await load_context(self._stored(PREVIOUS), previous)
        conversation = None
        if asked.conversation_id is not None:
            conversation = await self.conversation(asked.conversation_id, param="conversation")
            check_unlocked(conversation)
            context = Context(conversation_items(conversation))
        find = None if self.state is None else partial(self._find, param="input")
        parsed = await self.lanes.run(rough_length(asked.input), lambda: parse_items(asked.input, response_id, ignored))
        items = await resolve_references(find, parsed, response_id)
        is_stored = isinstance(asked, CreateResponseRequest) and self._is_stored(asked)
        if is_stored:
            check_storable(items)
        if conversation is not None:
            check_has_room(conversation, len(orjson.dumps(items)), param="conversation")
        return ResponseTurn(response_id, items, context, is_stored, asked.conversation_id)

    async def keep(self, turn: ResponseTurn, response: bytes, batch_id: BatchKey | None = None) -> None:
        """Store a response, if it is to be stored, and add it to its conversation, if it has one and is over.

        Raises InvalidRequest where the conversation has no room for it any more, and Conflict where another one was
        begun there meanwhile; with nothing stored.
        """
        stored = await self._store(turn, response, batch_id) if turn.is_stored else None
        if turn.conversation_id is None or self.conversations is None:
            return
        if batch_id is None:
            items = [*turn.items, *orjson.loads(response)["output"]]
            try:
                await outlast(partial(self.conversations.append, turn.conversation_id, items))
            except InvalidRequest:
                if stored is not None:
                    await self._stored("store").repository.remove(stored)
                raise
            return
        try:
            await self.conversations.await_response(turn.conversation_id, turn.response_id)
        except Conflict:  # of two that came at once, one is first
            if stored is not None:
                await self.delete(stored.response_id)
            raise

    async def _store(self, turn: ResponseTurn, response: bytes, batch_id: BatchKey | None) -> StoredResponse:
        state, now, items = self._stored("store"), time.time(), raw_json(turn.items)
        record = StoredResponse(
            response_id=turn.response_id,
            owner=state.owner,
            created_s=now,
            expires_s=now + state.config.response_lifetime_s,
            response=msgspec.Raw(response),
            items=items,
            ancestors=turn.context.ancestors,
            context_bytes=turn.context.num_bytes + len(bytes(items)) + len(response),
            batch_id=batch_id,
            conversation_id=turn.conversation_id,
        )
        await outlast(partial(state.add, record))  # the answer is all there
        return record

    async def submit(
        self, request: CreateResponseRequest, turn: ResponseTurn, response: dict[str, Any]
    ) -> dict[str, Any]:
        """Let a response be generated in the background; return it as it is now."""
        assert self.jobs is not None, "a background without a store"
        assert self.state is not None, "a background without a store"
        response |= {"status": "queued"}
        if request.stream:
            limits = EventLimits(self.state.config.max_response_events_bytes, self.state.config.max_events_bytes)
            await write_first_events(self.event_log, response, self.state.owner, limits)
        batch_id = await self.jobs.submit(request, turn.all_items, response)
        await self.keep(turn, orjson.dumps(response), batch_id)
        return response

    @property
    def event_log(self) -> EventLog:
        assert self.jobs is not None, "a background without a store"
        return self.jobs.files_api.stores.responses.events

    async def retrieve(self, text: str) -> StoredResponse:
        """Return a response as it is now. Raises NotFound."""
        return await self._find(text, "response_id")

    async def cancel(self, text: str) -> StoredResponse:
        record = await self.retrieve(text)
        if not orjson.loads(bytes(record.response))["background"]:
            raise InvalidRequest("Only responses in the background can be cancelled.", param="response_id")
        if record.batch_id is None or self.jobs is None:
            return record
        if await self.jobs.cancel(record.batch_id):
            return await self._note(record.batch_id, cancelled(record))
        return await self.retrieve(text)

    async def delete(self, text: str) -> StoredResponse:
        """Delete a response; one in the background is cancelled. Raises NotFound."""
        state = self._stored("response_id")
        record = await state.find(text)
        if record.batch_id is not None and self.jobs is not None:
            await self.jobs.cancel(record.batch_id)
        await state.repository.remove(record)
        return record

    async def input_items(self, text: str) -> list[Item]:
        """Return the items of a response's own input. Raises NotFound."""
        return items_of(await self._stored("response_id").find(text))

    async def _find(self, text: str, param: str) -> StoredResponse:
        record = await self._stored(param).find(text, param=param)
        if record.batch_id is None or self.jobs is None:
            return record
        return await self._note(record.batch_id, await self.jobs.settled(record, record.batch_id))

    async def _note(self, batch_id: BatchKey, record: StoredResponse) -> StoredResponse:
        if record.batch_id is None and self.jobs is not None:
            record = record if fits(record) else too_large(record)
            if not await self._settle(record):
                record = without_room(record)
            state = self._stored("response_id")
            max_bytes = state.config.max_responses_bytes
            record = await state.repository.settle(record, now=time.time(), max_bytes=max_bytes)
            await self.jobs.clean_up(batch_id)
        return record

    async def _settle(self, record: StoredResponse) -> bool:
        if record.conversation_id is None or self.conversations is None:
            return True
        is_generated = orjson.loads(bytes(record.response))["status"] in ("completed", "incomplete")
        items = [*items_of(record), *output_of(record)] if is_generated else []
        return await self.conversations.settle(record.conversation_id, record.response_id, items)

    async def conversation(self, text: str, *, param: str = "conversation_id") -> StoredConversation:
        """Return a conversation, with the items of what has ended in the background. Raises NotFound."""
        conversations = self.stored_conversations(param)
        record = await conversations.find(text, param=param)
        for response_id in record.pending:
            try:
                await self._find(response_id, param)
            except NotFound:  # deleted, or expired
                await conversations.settle(record.conversation_id, response_id, [])
        return await conversations.find(text, param=param) if record.pending else record

    def stored_conversations(self, param: str = "conversation_id") -> Conversations:
        """Return the conversations. Raises InvalidRequest where there are none."""
        self._stored(param)
        assert self.conversations is not None, "stored responses without conversations"
        return self.conversations

    def _is_stored(self, request: CreateResponseRequest) -> bool:
        if request.store is True or request.background:
            self._stored("background" if request.background else "store")
        return request.store is not False and self.state is not None

    def _stored(self, param: str) -> ResponseState:
        if self.state is None:
            message = "Responses are not stored here (batches.enabled is false)."
            raise InvalidRequest(message, param=param, code="responses_not_stored")
        return self.state
