"""Views of files and batches in OpenAI's shapes. Fields that are not set yet are left out, as in its specification."""

import time
from collections.abc import Sequence
from typing import Any

from alignedserve.batches.records import BatchRecord, Endpoint, Eta, FileRecord, LineProblem, Progress
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.batches.schedule import reason_to_wait, window_text
from alignedserve.config.sections import BatchesConfig
from alignedserve.gateway.files.schemas import MAX_WINDOW_S, MIN_WINDOW_S

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


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
        "request_counts": _counts(record, progress),
        "usage": _usage(progress),
        "metadata": record.metadata,
    }
    view |= {f"{name}_at": int(value) for name in _TIMES if (value := getattr(record, f"{name}_s")) is not None}
    if record.model is not None:
        view["model"] = record.model
    if record.problems:
        view["errors"] = {"object": "list", "data": [_problem(problem) for problem in record.problems]}
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


def _counts(record: BatchRecord, progress: Progress) -> dict[str, int]:
    counts = progress.counts
    return {"total": record.num_lines, "completed": counts.completed, "failed": counts.num_ended - counts.completed}


def _usage(progress: Progress) -> dict[str, Any]:
    usage = progress.usage
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _problem(problem: LineProblem) -> dict[str, Any]:
    return {"code": problem.code, "message": problem.message, "param": problem.param, "line": problem.line}


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
    fitting = _fitting_window(record, eta)
    return view if fitting is None else view | {"fitting_window": fitting}


def _fitting_window(record: BatchRecord, eta: Eta) -> str | None:
    if eta.fitting_s is None or eta.fitting_s - record.created_s > MAX_WINDOW_S:
        return None
    return window_text(eta.fitting_s - record.created_s)
