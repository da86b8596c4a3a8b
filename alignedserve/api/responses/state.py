"""Stored responses of one client; those of others do not exist for it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from alignedserve.api.errors import NotFound
from alignedserve.api.responses.items import Item, parsed_response_id
from alignedserve.batches.responses.bounded_records import MAX_RECORD_BYTES
from alignedserve.batches.responses.response_repository import ResponseRepository, StoredResponse
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest


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
        """Return responses in order. Raises NotFound if one of them is not there any more."""
        found = await self.repository.find(self.owner, list(response_ids))
        records = [record for record in found if record is not None]
        if len(records) < len(found):
            raise _not_found(param)
        return records

    async def add(self, record: StoredResponse) -> None:
        """Keep a new response."""
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
