"""Stored responses of one client, and their items that a new response continues or refers to."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import orjson

from alignedserve.api.errors import NotFound
from alignedserve.api.responses.items import Item, item_id, parsed_response_id, place_of
from alignedserve.batches.responses.response_repository import MAX_RECORD_BYTES, ResponseRepository, StoredResponse
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest

PREVIOUS = "previous_response_id"
Find = Callable[[str], Awaitable[StoredResponse]]
_MAX_CONTEXT_BYTES = 16_000_000  # of the stored responses that one more may continue
_MAX_REFERENCED = 16  # stored responses to whose items one input may refer


@dataclass(frozen=True, slots=True)
class ResponseState:
    """Reads and writes the responses of one client. Every method raises StoreUnavailable while the store is down."""

    repository: ResponseRepository
    config: GatewayConfig
    owner: str

    @property
    def max_turns(self) -> int:
        """Return how many stored responses one more may continue."""
        return self.config.max_response_turns

    async def find(self, text: str, *, param: str = "response_id") -> StoredResponse:
        """Return a response. Raises NotFound."""
        response_id = parsed_response_id(text)
        if response_id is None:
            raise _not_found(param)
        return (await self.find_all([response_id], param=param))[0]

    async def find_all(self, response_ids: Sequence[str], *, param: str) -> list[StoredResponse]:
        """Return responses in order. Raises NotFound if any is gone."""
        stored = await self.repository.find(self.owner, list(response_ids))
        records = [record for record in stored if record is not None]
        if len(records) < len(stored):
            raise _not_found(param)
        return records

    async def add(self, record: StoredResponse) -> None:
        """Keep a new response. Raises InvalidRequest where it is too large for that."""
        await self.repository.add(record, now=time.time(), max_bytes=self.config.max_responses_bytes)


def raw_json(value: Any) -> msgspec.Raw:
    """Return a value as it is stored."""
    return msgspec.Raw(orjson.dumps(value))


def items_of(record: StoredResponse) -> list[Item]:
    """Return the items of a response's own input."""
    items: list[Item] = orjson.loads(bytes(record.items))
    return items


def check_storable(items: Sequence[Item]) -> None:
    """Raise InvalidRequest for an input that is too large to be kept with an answer to it."""
    if len(orjson.dumps(items)) > MAX_RECORD_BYTES // 2:
        raise InvalidRequest("input is too large to be stored; set store to false.", param="store")


def _not_found(param: str) -> NotFound:
    code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
    return NotFound("No such response.", param=param, code=code)


class Context(NamedTuple):
    """What a response continues."""

    items: list[Item]  # inputs and outputs of all ancestors
    ancestors: tuple[str, ...] = ()  # the first one first
    num_bytes: int = 0  # in the store


async def load_context(state: ResponseState, previous: StoredResponse) -> Context:
    """Return all turns up to a response. Raises NotFound, or InvalidRequest for a conversation that is too long."""
    if previous.batch_id is not None:
        message = "The previous response is not over yet."
        raise InvalidRequest(message, param=PREVIOUS, code="previous_response_in_progress")
    if previous.conversation_id is not None:
        message = "The previous response is part of a conversation; continue that by its id."
        raise InvalidRequest(message, param=PREVIOUS, code="response_in_conversation")
    if len(previous.ancestors) >= state.max_turns or previous.context_bytes > _MAX_CONTEXT_BYTES:
        message = f"A conversation may have {state.max_turns} stored responses and {_MAX_CONTEXT_BYTES} bytes."
        raise InvalidRequest(message, param=PREVIOUS, code="context_length_exceeded")
    turns = [*await state.find_all(previous.ancestors, param=PREVIOUS), previous]
    items = [item for turn in turns for item in (*items_of(turn), *output_of(turn))]
    return Context(items, (*previous.ancestors, previous.response_id), previous.context_bytes)


async def resolve_references(find: Find | None, items: Sequence[Item], response_id: str) -> list[Item]:
    """Return the items with every reference replaced by its item. Raises NotFound, InvalidRequest.

    `find`: returns the response of an id; None: there are none.
    """
    places = [place_of(item["id"]) for item in items if item["type"] == "item_reference"]
    wanted = list(dict.fromkeys(item_place.response_id for item_place in places if item_place is not None))
    if len(wanted) > _MAX_REFERENCED:
        raise InvalidRequest(f"input refers to items of more than {_MAX_REFERENCED} responses.", param="input")
    turns = {} if find is None else {response_id: await find(response_id) for response_id in wanted}
    return [
        _resolved(item, turns, response_id, index) if item["type"] == "item_reference" else item
        for index, item in enumerate(items)
    ]


def _resolved(item: Item, turns: Mapping[str, StoredResponse], response_id: str, index: int) -> Item:
    item_place = place_of(item["id"])
    if item_place is not None and item_place.response_id in turns:
        turn = turns[item_place.response_id]
        known = items_of(turn) if item_place.is_input else output_of(turn)
        if item_place.place < len(known):
            item_there = known[item_place.place]
            return item_there | {"id": item_id(item_there["type"], response_id, index, is_input=True)}
    raise NotFound("An item that input refers to does not exist.", param="input", code="item_not_found")


def output_of(record: StoredResponse) -> list[Item]:
    """Return the items that a response consists of."""
    output: list[Item] = orjson.loads(bytes(record.response))["output"]
    return output
