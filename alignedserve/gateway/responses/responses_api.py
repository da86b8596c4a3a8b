"""The Responses API on behalf of one client: what routes call around generating a response."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import orjson

from alignedserve.api.errors import Conflict, NotFound
from alignedserve.api.responses.background_events import write_first_events
from alignedserve.api.responses.bodies import CreateResponseRequest, ResponseFields
from alignedserve.api.responses.context import (
    PREVIOUS,
    Context,
    ResponseState,
    check_storable,
    items_of,
    load_context,
    output_of,
    raw_json,
    resolve_references,
)
from alignedserve.api.responses.items import Item, parse_items
from alignedserve.api.responses.request_builder import new_response_id
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import WorkLanes, rough_length
from alignedserve.batches.records import BatchKey
from alignedserve.batches.responses.event_log import EventLimits, EventLog
from alignedserve.batches.responses.response_repository import StoredConversation, StoredResponse, fits
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.responses.background import BackgroundJobs, cancelled, too_large, without_room
from alignedserve.gateway.responses.conversations import (
    Conversations,
    check_has_room,
    check_unlocked,
    conversation_items,
)
from alignedserve.gateway.responses.store_loss import outlast
from alignedserve.gateway.services import Services


@dataclass(frozen=True, slots=True)
class Turn:
    """One response to be generated: its input, and what it continues."""

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

    async def begin(self, asked: ResponseFields, ignored: IgnoredFields | None) -> Turn:
        """Return the turn that a client asks for. Raises InvalidRequest, NotFound."""
        response_id, context = new_response_id(), Context([])
        if asked.previous_response_id is not None:
            previous = await self._find(asked.previous_response_id, PREVIOUS)
            context = await load_context(self._stored(PREVIOUS), previous)
        conversation = None if asked.conversation_id is None else await self._open_conversation(asked.conversation_id)
        if conversation is not None:
            context = Context(conversation_items(conversation))
        find = None if self.state is None else partial(self._find, param="input")
        parsed = await self.lanes.run(rough_length(asked.input), lambda: parse_items(asked.input, response_id, ignored))
        items = await resolve_references(find, parsed, response_id)
        is_stored = isinstance(asked, CreateResponseRequest) and self._is_stored(asked)
        if is_stored:
            check_storable(items)
        if conversation is not None:
            check_has_room(conversation, len(orjson.dumps(items)), param="conversation")
        return Turn(response_id, items, context, is_stored, asked.conversation_id)

    async def keep(self, turn: Turn, response: bytes, batch_id: BatchKey | None = None) -> None:
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

    async def _store(self, turn: Turn, response: bytes, batch_id: BatchKey | None) -> StoredResponse:
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

    async def submit(self, asked: CreateResponseRequest, turn: Turn, response: dict[str, Any]) -> dict[str, Any]:
        """Let a response be generated in the background; return it as it is now."""
        assert self.jobs is not None, "a background without a store"
        assert self.state is not None, "a background without a store"
        response |= {"status": "queued"}
        if asked.stream:
            limits = EventLimits(self.state.config.max_response_events_bytes, self.state.config.max_events_bytes)
            await write_first_events(self.event_log, response, self.state.owner, limits)
        batch_id = await self.jobs.submit(asked, turn.all_items, response)
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

    async def _open_conversation(self, text: str) -> StoredConversation:
        record = await self.conversation(text, param="conversation")
        check_unlocked(record)
        return record

    def stored_conversations(self, param: str = "conversation_id") -> Conversations:
        """Return the conversations. Raises InvalidRequest where there are none."""
        self._stored(param)
        assert self.conversations is not None, "stored responses without conversations"
        return self.conversations

    def _is_stored(self, asked: CreateResponseRequest) -> bool:
        if asked.store is True or asked.background:
            self._stored("background" if asked.background else "store")
        return asked.store is not False and self.state is not None

    def _stored(self, param: str) -> ResponseState:
        if self.state is None:
            message = "Responses are not stored here (batches.enabled is false)."
            raise InvalidRequest(message, param=param, code="responses_not_stored")
        return self.state
