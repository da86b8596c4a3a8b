"""Conversations of one client: their items, changed by the client and by responses; those of others do not exist."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import orjson

from alignedserve.api.errors import Conflict, NotFound
from alignedserve.api.responses.items import Item, is_conversation_id, parse_items
from alignedserve.api.responses.request_builder import raw_json
from alignedserve.api.schema import IgnoredFields
from alignedserve.batches.responses.response_repository import (
    MAX_RECORD_BYTES,
    ConversationRepository,
    DeletedItem,
    StoredConversation,
)
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest

_MAX_BYTES = MAX_RECORD_BYTES // 2  # of a conversation's items; an answer may still be added to as many
_MAX_BESIDE_BYTES = 500_000  # of what a record holds beside items
_MAX_BYTES_AFTER = MAX_RECORD_BYTES - _MAX_BESIDE_BYTES  # of items, once a response has been added
_MAX_ITEMS = 10_000
_MAX_DELETED = 200  # that are remembered: more than one page of a list

Change = Callable[[StoredConversation], StoredConversation]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Operations on conversations of one client. Every method raises StoreUnavailable while the store is down."""

    repository: ConversationRepository
    config: GatewayConfig
    owner: str

    async def create(
        self, items: Sequence[dict[str, Any]], metadata: dict[str, str], ignored: IgnoredFields | None
    ) -> StoredConversation:
        now = time.time()
        record = StoredConversation(
            conversation_id=f"conv_{secrets.token_hex(16)}",
            owner=self.owner,
            created_s=now,
            metadata=metadata,
            items=raw_json([]),
        )
        record = _extended(record, _new_items(items, ignored))
        await self.repository.add(record, now=now, **self._limits)
        return record

    async def find(self, text: str, *, param: str = "conversation_id") -> StoredConversation:
        record = await self.repository.find(self.owner, text) if is_conversation_id(text) else None
        if record is None:
            raise _not_found(param)
        return record

    async def set_metadata(self, text: str, metadata: dict[str, str]) -> StoredConversation:
        return await self._change(text, lambda record: msgspec.structs.replace(record, metadata=metadata))

    async def delete(self, text: str) -> None:
        await self.repository.remove(await self.find(text))

    async def add_items(self, text: str, items: Sequence[dict[str, Any]], ignored: IgnoredFields | None) -> list[Item]:
        """Add a client's items at the end, and return them with their ids. Raises NotFound, InvalidRequest."""
        added = _new_items(items, ignored)
        await self._change(text, lambda record: _extended(record, added))
        return added

    async def remove_item(self, text: str, item_id: str) -> StoredConversation:
        return await self._change(text, partial(_without_item, item_id=item_id))

    async def append(self, conversation_id: str, items: Sequence[Item]) -> None:
        """Add the items of a response, unless the conversation was deleted meanwhile. May be repeated.

        Raises InvalidRequest where other responses have left no room.
        """
        await self._change_if_there(conversation_id, partial(_with_response, items=items))

    async def await_response(self, conversation_id: str, response_id: str) -> None:
        """Note a response in the background, whose items are still to come. Raises Conflict where there is another."""

        def awaited(record: StoredConversation) -> StoredConversation:
            check_unlocked(record)
            return msgspec.structs.replace(record, pending=(response_id,))

        await self._change_if_there(conversation_id, awaited)

    async def settle(self, conversation_id: str, response_id: str, items: Sequence[Item]) -> bool:
        """Add the items of a response in the background that is over. May be repeated.

        Returns False where other responses have left no room: the conversation goes on without it.
        """
        has_room = True

        def settled(record: StoredConversation) -> StoredConversation:
            nonlocal has_room
            has_room = True
            if response_id not in record.pending:
                return record
            rest = msgspec.structs.replace(
                record, pending=tuple(pending_id for pending_id in record.pending if pending_id != response_id)
            )
            try:
                return _with_response(rest, items)
            except InvalidRequest:
                has_room = False
                return rest

        await self._change_if_there(conversation_id, settled)
        return has_room

    async def _change(self, text: str, changed: Change) -> StoredConversation:
        record = await self._change_if_there(text, changed) if is_conversation_id(text) else None
        if record is None:
            raise _not_found("conversation_id")
        return record

    async def _change_if_there(self, conversation_id: str, changed: Change) -> StoredConversation | None:
        return await self.repository.change(self.owner, conversation_id, changed, now=time.time(), **self._limits)

    @property
    def _limits(self) -> dict[str, Any]:
        return {"lifetime_s": self.config.response_lifetime_s, "max_bytes": self.config.max_responses_bytes}


def conversation_items(record: StoredConversation) -> list[Item]:
    items: list[Item] = orjson.loads(bytes(record.items))
    return items


def conversation_view(record: StoredConversation) -> dict[str, Any]:
    return {
        "id": record.conversation_id,
        "object": "conversation",
        "created_at": int(record.created_s),
        "metadata": record.metadata,
    }


def find_item(record: StoredConversation, item_id: str) -> Item:
    wanted = next((item for item in conversation_items(record) if item["id"] == item_id), None)
    if wanted is None:
        raise NotFound("No such item in this conversation.", param="item_id", code="item_not_found")
    return wanted


def check_unlocked(record: StoredConversation) -> None:
    if record.pending:
        message = "A response of this conversation is still generated in the background."
        raise Conflict(message, param="conversation", code="conversation_locked")


def check_has_room(record: StoredConversation, num_bytes: int, *, param: str) -> None:
    if len(bytes(record.items)) + num_bytes > _MAX_BYTES:
        message = f"A conversation may have {_MAX_BYTES} bytes of items."
        raise InvalidRequest(message, param=param, code="context_length_exceeded")


def _new_items(raw_items: Sequence[dict[str, Any]], ignored: IgnoredFields | None) -> list[Item]:
    items = parse_items(raw_items, secrets.token_hex(16), ignored, param="items")
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            param = f"items[{index}].type"
            raise InvalidRequest(f"{param} 'item_reference' is not supported here.", param=param)
    return items


def _extended(record: StoredConversation, items: Sequence[Item]) -> StoredConversation:
    check_has_room(record, len(orjson.dumps(items)), param="items")
    if len(conversation_items(record)) + len(items) > _MAX_ITEMS:
        raise InvalidRequest(f"A conversation may have {_MAX_ITEMS} items.", param="items")
    return _joined(record, items)


def _with_response(record: StoredConversation, items: Sequence[Item]) -> StoredConversation:
    added = {item["id"] for item in items}
    if any(item["id"] in added for item in conversation_items(record)):  # their ids are new in every response
        return record
    after = _joined(record, items)
    if items and len(bytes(after.items)) > _MAX_BYTES_AFTER:
        message = "Other responses have been added to this conversation meanwhile; there is no room for this one."
        raise InvalidRequest(message, param="conversation", code="context_length_exceeded")
    return after


def _joined(record: StoredConversation, items: Sequence[Item]) -> StoredConversation:
    known = conversation_items(record)
    return msgspec.structs.replace(record, items=raw_json([*known, *map(_without_logprobs, items)]))


def _without_logprobs(item: Item) -> Item:
    if item["type"] != "message":
        return item
    return item | {"content": [part | ({"logprobs": []} if "logprobs" in part else {}) for part in item["content"]]}


def _without_item(record: StoredConversation, item_id: str) -> StoredConversation:
    find_item(record, item_id)
    items = conversation_items(record)
    index = [item["id"] for item in items].index(item_id)
    behind = [item._replace(place=item.place - (item.place > index)) for item in record.deleted]
    deleted = (*behind, DeletedItem(item_id, index))[-_MAX_DELETED:]
    return msgspec.structs.replace(record, items=raw_json(items[:index] + items[index + 1 :]), deleted=deleted)


def _not_found(param: str) -> NotFound:
    return NotFound("No such conversation.", param=param, code="conversation_not_found")
