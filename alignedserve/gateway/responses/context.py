"""Items of earlier responses: those that a new response continues, and those that its input refers to."""

from collections.abc import Sequence
from typing import NamedTuple

import orjson

from alignedserve.batches.response_repository import StoredResponse
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.errors import NotFound
from alignedserve.gateway.responses.items import Item, place_of
from alignedserve.gateway.responses.state import ResponseState, items_of

_MAX_CONTEXT_BYTES = 16_000_000  # of the stored responses that one more may continue
_MAX_REFERENCED = 16  # stored responses to whose items one input may refer


class Context(NamedTuple):
    """What a response continues."""

    items: list[Item]  # inputs and outputs of all ancestors
    ancestors: tuple[str, ...] = ()  # the first one first
    num_bytes: int = 0  # in the store


async def load_context(state: ResponseState, previous_id: str) -> Context:
    """Return all turns up to a response. Raises NotFound, or InvalidRequest for a conversation that is too long."""
    previous = await state.find(previous_id, param="previous_response_id")
    if previous.batch_id is not None:
        message = "The previous response is not over yet."
        raise InvalidRequest(message, param="previous_response_id", code="previous_response_in_progress")
    if len(previous.ancestors) >= state.max_turns or previous.context_bytes > _MAX_CONTEXT_BYTES:
        message = f"A conversation may have {state.max_turns} stored responses and {_MAX_CONTEXT_BYTES} bytes."
        raise InvalidRequest(message, param="previous_response_id", code="context_length_exceeded")
    turns = [*await state.find_all(previous.ancestors, param="previous_response_id"), previous]
    items = [item for turn in turns for item in (*items_of(turn), *output_of(turn))]
    return Context(items, (*previous.ancestors, previous.response_id), previous.context_bytes)


async def resolve_references(state: ResponseState | None, items: Sequence[Item]) -> list[Item]:
    """Return the items with those in place that they refer to. Raises NotFound, InvalidRequest."""
    places = [place_of(item["id"]) if item["type"] == "item_reference" else None for item in items]
    wanted = list(dict.fromkeys(place.response_id for place in places if place is not None))
    if len(wanted) > _MAX_REFERENCED:
        raise InvalidRequest(f"input refers to items of more than {_MAX_REFERENCED} responses.", param="input")
    found = {} if state is None else {name: await state.find(name, param="input") for name in wanted}
    resolved = []
    for item, place in zip(items, places, strict=True):
        if item["type"] != "item_reference":
            resolved.append(item)
            continue
        turn = None if place is None else found.get(place.response_id)
        known = [] if turn is None or place is None else items_of(turn) if place.is_input else output_of(turn)
        if place is None or place.index >= len(known):
            raise NotFound("An item that input refers to does not exist.", param="input", code="item_not_found")
        resolved.append(known[place.index])
    return resolved


def output_of(record: StoredResponse) -> list[Item]:
    """Return the items that a response consists of."""
    output: list[Item] = orjson.loads(bytes(record.response))["output"]
    return output
