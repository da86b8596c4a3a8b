"""The Responses API on behalf of one client: what routes call around generating a response."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import orjson

from alignedserve.batches.records import BatchKey
from alignedserve.batches.response_repository import StoredResponse
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.gateway.responses.background import BackgroundJobs, cancelled
from alignedserve.gateway.responses.context import PREVIOUS, Context, load_context, resolve_references
from alignedserve.gateway.responses.items import Item, parse_items
from alignedserve.gateway.responses.request_builder import new_response_id
from alignedserve.gateway.responses.schemas import CreateResponseRequest, PromptFields
from alignedserve.gateway.responses.state import ResponseState, check_storable, items_of, raw_json
from alignedserve.gateway.services import Services


@dataclass(frozen=True, slots=True)
class Turn:
    """One response to be generated: its input, and what it continues."""

    response_id: str
    items: list[Item]  # of its own input
    context: Context
    is_stored: bool = False

    @property
    def all_items(self) -> list[Item]:
        """Return the items of all turns, the first one first."""
        return [*self.context.items, *self.items]


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """Operations on stored responses. Every method raises StoreUnavailable while the store is down."""

    state: ResponseState | None  # None: responses are not stored here, like the next
    jobs: BackgroundJobs | None

    @classmethod
    def of(cls, services: Services, owner: str) -> "ResponsesApi":
        """Return the API for one client."""
        files_api, config = services.files_api, services.config
        if files_api is None:
            return cls(None, None)
        state = ResponseState(files_api.stores.responses, config, owner)
        return cls(state, BackgroundJobs(files_api, owner, config.response_lifetime_s))

    async def begin(self, asked: PromptFields, ignored: IgnoredFields | None) -> Turn:
        """Return the turn that a client asks for. Raises InvalidRequest, NotFound."""
        response_id, context = new_response_id(), Context([])
        if asked.previous_response_id is not None:
            previous = await self._find(asked.previous_response_id, PREVIOUS)
            context = await load_context(self._stored(PREVIOUS), previous)
        find = None if self.state is None else partial(self._find, param="input")
        items = await resolve_references(find, parse_items(asked.input, response_id, ignored))
        is_stored = isinstance(asked, CreateResponseRequest) and self._is_stored(asked)
        if is_stored:
            check_storable(items)
        return Turn(response_id, items, context, is_stored)

    async def keep(self, turn: Turn, response: bytes, batch_id: BatchKey | None = None) -> None:
        """Store a response, if it is to be stored."""
        if not turn.is_stored:
            return
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
        )
        await state.add(record)

    async def submit(self, asked: CreateResponseRequest, turn: Turn, response: dict[str, Any]) -> dict[str, Any]:
        """Let a response be generated in the background; return it as it is now."""
        assert self.jobs is not None, "a background without a store"
        batch_id = await self.jobs.submit(asked, turn.all_items, turn.response_id)
        response |= {"status": "queued"}
        await self.keep(turn, orjson.dumps(response), batch_id)
        return response

    async def retrieve(self, text: str) -> StoredResponse:
        """Return a response as it is now. Raises NotFound."""
        return await self._find(text, "response_id")

    async def cancel(self, text: str) -> StoredResponse:
        """Cancel a response in the background; one that is over is left as it is. Raises NotFound, InvalidRequest."""
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

    async def input_items(
        self, text: str, *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[Item], bool]:
        """Return a page of the items of a response's own input, and whether there are more. Raises NotFound."""
        items = items_of(await self._stored("response_id").find(text))
        if newest_first:
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise InvalidRequest("after is not the id of an item in this list.", param="after")
        first = 0 if after is None else ids.index(after) + 1
        return items[first : first + limit], len(items) > first + limit

    async def _find(self, text: str, param: str) -> StoredResponse:
        """Return a response as it is now. Raises NotFound."""
        record = await self._stored(param).find(text, param=param)
        if record.batch_id is None or self.jobs is None:
            return record
        return await self._note(record.batch_id, await self.jobs.settled(record, record.batch_id))

    async def _note(self, batch_id: BatchKey, record: StoredResponse) -> StoredResponse:
        """Keep what became of a response whose batch is over, and delete the batch's files."""
        if record.batch_id is None and self.jobs is not None:
            await self._stored("response_id").repository.replace(record, now=time.time())
            await self.jobs.clean_up(batch_id)
        return record

    def _is_stored(self, asked: CreateResponseRequest) -> bool:
        if asked.store is True or asked.background:
            self._stored("background" if asked.background else "store")
        return asked.store is not False and self.state is not None

    def _stored(self, param: str) -> ResponseState:
        """Return the stored responses. Raises InvalidRequest where there are none."""
        if self.state is None:
            message = "Responses are not stored here (batches.enabled is false)."
            raise InvalidRequest(message, param=param, code="responses_not_stored")
        return self.state
