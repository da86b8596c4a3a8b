"""Parses bodies of the Responses API. What is not supported and would change an answer is refused by name."""

from typing import Any, NoReturn

from alignedserve.api.openai.parsing import SchemaT, parse
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.responses.schemas import CreateResponseRequest, InputTokensRequest
from alignedserve.api.responses.tools import parse_tools
from alignedserve.core.errors import InvalidRequest

_UNSUPPORTED = (
    *("access_programs", "context_management", "image", "moderation", "personality", "prompt"),
    *("prompt_cache_options", "prompt_cache_retention"),
)


def parse_response(body: dict[str, Any], ignored: IgnoredFields | None) -> CreateResponseRequest:
    """Check the body of a new response, except its items. Raises InvalidRequest naming the field."""
    asked = _parse(CreateResponseRequest, body, ignored)
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if asked.background and asked.store is False:
        raise InvalidRequest("background needs store to be true.", param="store")
    return asked


def parse_input_tokens(body: dict[str, Any], ignored: IgnoredFields | None) -> InputTokensRequest:
    """Check the body of a count of input tokens, except its items. Raises InvalidRequest naming the field."""
    return _parse(InputTokensRequest, body, ignored)


def _parse(schema: type[SchemaT], body: dict[str, Any], ignored: IgnoredFields | None) -> SchemaT:
    for name in _UNSUPPORTED:
        if body.get(name) is not None:
            _refuse(name)
    if body.get("conversation") is not None and body.get("previous_response_id") is not None:
        raise InvalidRequest("Give conversation or previous_response_id, not both.", param="conversation")
    return parse(schema, body | {"tools": parse_tools(body.get("tools"), ignored)}, ignored)


def _refuse(what: str, param: str | None = None) -> NoReturn:
    raise InvalidRequest(f"{what} is not supported.", param=param or what, code="unsupported_parameter")
