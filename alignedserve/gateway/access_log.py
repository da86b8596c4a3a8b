"""The access log: a line for every request that was answered, or whose client left before."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from alignedserve.api.openai.generation import Generation
from alignedserve.keys.entry import KeyEntry
from alignedserve.process.logs import FIELDS

logger = logging.getLogger("alignedserve.access")

_MAX_PATH_LEN = 200


class Answered:
    """What a request's response has come to."""

    __slots__ = ("client_id", "num_bytes", "status")

    def __init__(self, client_id: str | None) -> None:
        self.client_id = client_id  # that the client gave the request; None: it gave none
        self.status: int | None = None  # None: nothing was answered
        self.num_bytes = 0  # of the body


def log_access(scope: Scope, answered: Answered, elapsed_s: float) -> None:
    fields = _fields(scope, answered, elapsed_s)
    words = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "path"))
    logger.info("%s %s %s", fields["method"], fields["path"], words, extra={FIELDS: fields})


def _fields(scope: Scope, answered: Answered, elapsed_s: float) -> dict[str, Any]:
    state: Mapping[str, Any] = scope["state"]
    key: KeyEntry | None = state.get("key")
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": _printable(scope["path"]),
        "status": answered.status if answered.status is not None else "client_gone",
        "ms": round(elapsed_s * 1000.0, 1),
        "bytes": answered.num_bytes,
        "request_id": state["request_id"],
    }
    if answered.client_id is not None:
        fields["client_id"] = answered.client_id
    if key is not None and key.name:
        fields["key"] = key.name
    generation: Generation | None = state.get("generation")
    return fields if generation is None else fields | _of_generation(generation)


def _of_generation(generation: Generation) -> dict[str, Any]:
    request = generation.request
    return {
        "model": request.model,
        "class": request.requests[0].request_class.name.lower(),
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": generation.num_generated_tokens,
    }


def _printable(path: str) -> str:
    shown = path[:_MAX_PATH_LEN]
    return "".join(character if character.isprintable() and character != " " else "?" for character in shown)
