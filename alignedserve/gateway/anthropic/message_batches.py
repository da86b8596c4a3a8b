"""Message batches: each is a batch whose lines are messages, which the driver of batches runs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import FailFast, Field

from alignedserve.api.errors import NotFound
from alignedserve.api.schema import Schema
from alignedserve.batches.records import Endpoint, ResultKind
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.anthropic.message_batch_views import result_view
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.files.submission import input_line, submit_lines
from alignedserve.gateway.services import Services


class BatchedMessage(Schema):
    """One request of a batch. Its params are checked when it runs."""

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, Any]


class CreateMessageBatch(Schema):
    """Body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1), FailFast()]


@dataclass(frozen=True, slots=True)
class MessageBatches:
    """Message batches of one client."""

    files_api: FilesApi
    owner: str  # as api_owner makes it

    async def create(self, asked: CreateMessageBatch, services: Services) -> BatchSnapshot:
        """Create a batch. Raises InvalidRequest naming the field, QuotaExceeded, StorageFull."""
        _check(asked, services, self.files_api.config.max_lines)
        lines = [input_line(one.custom_id, Endpoint.MESSAGES, one.params) for one in asked.requests]
        if any(len(line) > self.files_api.config.max_line_bytes for line in lines):
            raise InvalidRequest("A request is too large for a batch.", param="requests")
        return await submit_lines(self.files_api, self.owner, lines, Endpoint.MESSAGES, name="messages.jsonl")

    def results(self, snapshot: BatchSnapshot) -> AsyncIterator[bytes]:
        """Return the lines of the results. Raises NotFound before the batch is over."""
        if not snapshot.record.is_over:
            raise NotFound("The batch has not ended.", param="message_batch_id")
        return self._result_lines(snapshot)

    async def _result_lines(self, snapshot: BatchSnapshot) -> AsyncIterator[bytes]:
        for kind in ResultKind:
            chunks = self.files_api.stores.logs.chunks(snapshot.record.batch_id, kind, snapshot.progress.log_bytes)
            async for line in _lines_of(chunks):
                yield orjson.dumps(result_view(orjson.loads(line))) + b"\n"


def _check(asked: CreateMessageBatch, services: Services, max_requests: int) -> None:
    """Raise InvalidRequest for what would make the whole batch fail, naming the request."""
    if len(asked.requests) > max_requests:
        raise InvalidRequest(f"requests must hold at most {max_requests} requests.", param="requests")
    seen: set[str] = set()
    for place, one in enumerate(asked.requests):
        path = f"requests[{place}]"
        if one.custom_id in seen:
            raise InvalidRequest(f"{path}.custom_id was used by an earlier request.", param=f"{path}.custom_id")
        seen.add(one.custom_id)
        model = one.params.get("model")
        if not isinstance(model, str):
            raise InvalidRequest(f"Invalid value for {path}.params.model.", param=f"{path}.params.model")
        services.models.card(model)


async def _lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
