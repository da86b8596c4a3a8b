"""Requests for files and batches, and their validation."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from alignedserve.api.schema import Metadata, Priority, Schema
from alignedserve.batches.hours import MAX_HOURS_LEN, Schedule, parse_hours
from alignedserve.batches.records import Endpoint
from alignedserve.core.errors import InvalidRequest

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
MIN_WINDOW_S, MAX_WINDOW_S = 60.0, 7 * 86_400.0
_LAST_S = 4_102_444_800.0  # the year 2100
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2_592_000


class ExpiresAfter(Schema):
    """Expiry of a file."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)


class CreateBatchRequest(Schema):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: str
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    not_before: float | Annotated[str, Field(max_length=64)] | None = None  # Unix seconds, or a time as in RFC 3339
    hours: Annotated[str, Field(max_length=MAX_HOURS_LEN)] | None = None
    priority: Priority = 0  # among one's own


def endpoint_of(name: str) -> Endpoint:
    """Parse an endpoint. Raises InvalidRequest listing the valid ones."""
    try:
        return Endpoint(name)
    except ValueError:
        known = ", ".join(endpoint.value for endpoint in Endpoint)
        raise InvalidRequest(f"endpoint must be one of {known}.", param="endpoint", code="invalid_value") from None


def window_s(text: str) -> float:
    """Parse a completion window such as 24h, 90m or 7d into seconds. Raises InvalidRequest."""
    match = _WINDOW.fullmatch(text)
    seconds = float(int(match[1]) * _UNITS_S[match[2]]) if match else 0.0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        raise InvalidRequest(
            "completion_window must be a duration from 1m to 7d, such as 90m or 24h.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds


def schedule_asked(asked: CreateBatchRequest) -> Schedule:
    """Parse when lines of a batch may start. Raises InvalidRequest."""
    not_before_s = 0.0 if asked.not_before is None else _unix_s(asked.not_before)
    return Schedule(not_before_s, None if asked.hours is None else parse_hours(asked.hours))


def _unix_s(given: float | str) -> float:
    if not isinstance(given, str):
        unix_s = given
    else:
        try:
            moment = datetime.fromisoformat(given)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise _refused_time(f"not_before is no time with its zone: {given!r}.")
        unix_s = moment.timestamp()
    if not 0.0 <= unix_s <= _LAST_S:
        raise _refused_time("not_before lies too far away.")
    return unix_s


def _refused_time(message: str) -> InvalidRequest:
    hint = "Send Unix seconds, or a time such as 2026-11-25T22:00:00+01:00."
    return InvalidRequest(f"{message} {hint}", param="not_before", code="invalid_value")


def lifetime_of(fields: dict[str, str]) -> float | None:
    """Parse the seconds after which a file expires from the form's fields. Raises InvalidRequest."""
    given: dict[str, Any] = {name: value for name, value in fields.items() if name.startswith("expires_after")}
    if not given:
        return None
    seconds = fields.get("expires_after[seconds]", "")
    if fields.get("expires_after[anchor]") != "created_at":
        raise InvalidRequest("expires_after[anchor] must be created_at.", param="expires_after[anchor]")
    if not re.fullmatch(r"\d{1,9}", seconds, re.ASCII) or not MIN_LIFETIME_S <= int(seconds) <= MAX_LIFETIME_S:
        raise InvalidRequest(
            f"expires_after[seconds] must be between {MIN_LIFETIME_S} and {MAX_LIFETIME_S}.",
            param="expires_after[seconds]",
        )
    return float(seconds)
