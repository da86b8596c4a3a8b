"""Answers of the Responses and Conversations API against OpenAI's own description of them."""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import ValidationError  # type: ignore[import-untyped]

from tests.gateway.completions.api_description import ApiDescription

DESCRIPTION = Path(__file__).with_name("openai-responses-trimmed.yaml")
_PREFIXES = ("/v1/responses", "/v1/conversations")
_EVENTS = "text/event-stream"

Message = MutableMapping[str, Any]
Call = Callable[[Any, Any, Any, Any], Awaitable[None]]  # an app's `__call__`


@dataclass
class Answer:
    """What a gateway sent for one request; of a stream that was left, what had been sent until then."""

    method: str
    path: str
    status: int = 0
    content_type: str = ""
    body: bytes = b""

    def record(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            self.status, self.content_type = message["status"], headers.get("content-type", "")
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    def events(self) -> Iterator[dict[str, Any]]:
        for block in self.body.decode().split("\n\n")[:-1]:
            yield json.loads(block[block.index("data: ") + len("data: ") :])


def recording(call: Call, answers: list[Answer]) -> Call:
    """Return a method that answers as the given one does, and notes every answer of the two APIs."""

    async def recorded(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PREFIXES):
            await call(self, scope, receive, send)
            return
        answer = Answer(scope["method"], scope["path"])
        answers.append(answer)

        async def record_and_send(message: Message) -> None:
            answer.record(message)
            await send(message)

        await call(self, scope, receive, record_and_send)

    return recorded


@cache
def described() -> ApiDescription:
    """Return the description, with the null of two fields that its own examples have and its types leave out."""
    read = ApiDescription(DESCRIPTION)
    (own,) = (part for part in read.schemas["Response"]["allOf"] if "usage" in part.get("properties", {}))
    for owner, member in ((own, "usage"), (read.schemas["ModelResponseProperties"], "user")):
        properties = owner["properties"]
        properties[member] = {"anyOf": [properties[member], {"type": "null"}]}
    return read


def check(answer: Answer) -> None:
    """Validate an answer. Raises AssertionError naming the request and what is wrong."""
    if answer.status >= 400:
        _validate("ErrorResponse", json.loads(answer.body), answer)
    elif answer.content_type.startswith(_EVENTS):
        for event in answer.events():
            _validate(_event_schemas()[event["type"]], event, answer)
    elif answer.status == 200:
        schema = _schema(answer)
        if schema is not None:
            _validate(schema, json.loads(answer.body), answer)


def _validate(schema: str, value: Any, answer: Answer) -> None:
    try:
        described().validator(schema).validate(value)
    except ValidationError as error:
        where = "/".join(map(str, error.absolute_path))
        raise AssertionError(f"{answer.method} {answer.path}: {schema}: {where}: {error.message}") from error


def _schema(answer: Answer) -> str | None:
    """Return the schema of a successful answer; None: the description has none. An unknown path is a ValueError."""
    path = answer.path.removeprefix("/v1")
    # Plain words come before parameters: /responses/input_tokens is no response.
    paths = described().paths
    known = min((own for own in paths if re.fullmatch(_pattern(own), path)), key=lambda own: own.count("{"))
    content = paths[known][answer.method.lower()]["responses"]["200"].get("content")
    return None if content is None else _name_of(content["application/json"]["schema"])


def _pattern(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "[^/]+", path)


def _name_of(reference: dict[str, Any]) -> str:
    name: str = reference["$ref"].rpartition("/")[2]
    return name


@cache
def _event_schemas() -> dict[str, str]:
    """Return the names of events' schemas by the events' types: one is quicker to try than all, and says more."""
    schemas = described().schemas
    names = [_name_of(each) for each in schemas["ResponseStreamEvent"]["anyOf"]]
    return {kind: name for name in names for kind in schemas[name]["properties"]["type"]["enum"]}
