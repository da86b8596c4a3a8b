"""Bodies of requests for files and batches, and views of both in OpenAI's shapes: without unset fields."""

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from alignedserve.api.schema import Metadata, Priority, Schema
from alignedserve.batches.hours import MAX_HOURS_LEN, Schedule, parse_hours, reason_to_wait, window_text
from alignedserve.batches.records import BatchRecord, Endpoint, Eta, FileRecord, Progress
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import InvalidRequest

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
MIN_WINDOW_S, MAX_WINDOW_S = 60.0, 7 * 86_400.0
_LAST_S = 4_102_444_800.0  # the year 2100
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2_592_000
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


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


def schedule_asked(request: CreateBatchRequest) -> Schedule:
    """Parse when lines of a batch may start. Raises InvalidRequest."""
    not_before_s = 0.0 if request.not_before is None else _unix_s(request.not_before)
    return Schedule(not_before_s, None if request.hours is None else parse_hours(request.hours))


def _unix_s(value: float | str) -> float:
    if not isinstance(value, str):
        unix_s = value
    else:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise _refused_time(f"not_before is no time with its zone: {value!r}.")
        unix_s = moment.timestamp()
    if not 0.0 <= unix_s <= _LAST_S:
        raise _refused_time("not_before lies too far away.")
    return unix_s


def _refused_time(message: str) -> InvalidRequest:
    hint = "Send Unix seconds, or a time such as 2026-11-25T22:00:00+01:00."
    return InvalidRequest(f"{message} {hint}", param="not_before", code="invalid_value")


def lifetime_of(fields: dict[str, str]) -> float | None:
    """Parse the seconds after which a file expires from the form's fields. Raises InvalidRequest."""
    expiry: dict[str, Any] = {name: value for name, value in fields.items() if name.startswith("expires_after")}
    if not expiry:
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


def file_view(record: FileRecord, num_bytes: int) -> dict[str, Any]:
    view: dict[str, Any] = {
        "id": record.file_id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": int(record.created_s),
        "filename": record.name,
        "purpose": record.purpose,
        "status": "processed",
    }
    if record.expires_s is not None:
        view["expires_at"] = int(record.expires_s)
    return view


def batch_view(snapshot: BatchSnapshot) -> dict[str, Any]:
    record, progress = snapshot.record, snapshot.progress
    view: dict[str, Any] = {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint.value,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status.value,
        "created_at": int(record.created_s),
        "expires_at": int(record.expires_s),
        "request_counts": {
            "total": record.num_lines,
            "completed": progress.counts.completed,
            "failed": progress.counts.num_ended - progress.counts.completed,
        },
        "usage": _usage(progress),
        "metadata": record.metadata,
    }
    view |= {f"{name}_at": int(value) for name in _TIMES if (value := getattr(record, f"{name}_s")) is not None}
    if record.model is not None:
        view["model"] = record.model
    if record.problems:
        problems = [
            {"code": problem.code, "message": problem.message, "param": problem.param, "line": problem.line}
            for problem in record.problems
        ]
        view["errors"] = {"object": "list", "data": problems}
    if progress.output_bytes:
        view["output_file_id"] = record.output_file_id
    if progress.error_bytes:
        view["error_file_id"] = record.error_file_id
    view["alignedserve"] = _extension(record, progress, time.time())
    return view


def list_view(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    view: dict[str, Any] = {"object": "list", "data": list(items), "has_more": has_more}
    if items:
        view |= {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return view


def limits_view(config: BatchesConfig) -> dict[str, Any]:
    return {
        "object": "batch.limits",
        "max_file_bytes": config.max_file_bytes,
        "max_lines": config.max_lines,
        "max_line_bytes": config.max_line_bytes,
        "max_files": config.max_files,
        "max_files_bytes": config.max_files_bytes,
        "max_active_batches": config.max_active,
        "completion_window_s": [MIN_WINDOW_S, MAX_WINDOW_S],
        "endpoints": [endpoint.value for endpoint in Endpoint],
    }


def _usage(progress: Progress) -> dict[str, Any]:
    usage = progress.usage
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _extension(record: BatchRecord, progress: Progress, now: float) -> dict[str, Any]:
    counts = progress.counts
    waiting = None if record.is_ending else reason_to_wait(record, now)
    return {
        "lines_validated": max(progress.num_validated, record.num_lines),
        "lines_expired": counts.expired,
        "lines_cancelled": counts.cancelled,
        "compute_seconds": progress.usage.compute_us / 1e6,
        "paused": None if record.is_over else waiting or progress.paused,
        "quote": None if progress.eta is None or record.is_ending else _eta(record, progress.eta),
    } | _schedule(record)


def _schedule(record: BatchRecord) -> dict[str, Any]:
    fields = {
        "not_before": None if record.not_before_s is None else int(record.not_before_s),
        "hours": record.hours,
        "priority": record.priority or None,
        "paused_at": None if record.paused_s is None or record.is_over else int(record.paused_s),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _eta(record: BatchRecord, eta: Eta) -> dict[str, Any]:
    view = {
        "verdict": eta.risk.value,
        "expected_at": int(eta.finish_s),
        "slack_s": round(record.expires_s - eta.finish_s, 1),
        "basis": "measured" if eta.is_measured else "assumed",
        "quoted_at": int(eta.estimated_s),
    }
    if eta.fitting_s is None or eta.fitting_s - record.created_s > MAX_WINDOW_S:
        return view
    return view | {"fitting_window": window_text(eta.fitting_s - record.created_s)}
