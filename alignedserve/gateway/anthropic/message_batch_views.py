"""Views of message batches and of their results in Anthropic's shapes."""

from typing import Any

from alignedserve.api.anthropic.errors import error_view
from alignedserve.api.anthropic.timestamps import timestamp
from alignedserve.batches.records import BatchStatus
from alignedserve.batches.repository import BatchSnapshot

# Codes of lines that did not run, and this API's names of them.
_UNRUN = {"batch_expired": "expired", "batch_cancelled": "canceled"}


def batch_view(snapshot: BatchSnapshot, results_url: str) -> dict[str, Any]:
    """Return a batch; its results are at this address once it is over."""
    record = snapshot.record
    return {
        "id": record.batch_id,
        "type": "message_batch",
        "processing_status": _processing_status(snapshot),
        "request_counts": _counts(snapshot),
        "created_at": timestamp(record.created_s),
        "expires_at": timestamp(record.expires_s),
        "ended_at": timestamp(record.over_s) if record.is_over else None,
        "cancel_initiated_at": timestamp(record.cancelling_s) if record.cancelling_s is not None else None,
        "archived_at": None,
        "results_url": results_url if record.is_over else None,
    }


def result_view(line: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one request, from its line in the files of results."""
    return {"custom_id": line["custom_id"], "result": _result(line["response"], line["error"])}


def _result(response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    if response is not None and response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    if response is not None:
        return {"type": "errored", "error": response["body"]}
    assert error is not None, "a line without a response has an error"
    if error["code"] in _UNRUN:
        return {"type": _UNRUN[error["code"]]}
    return {"type": "errored", "error": error_view(error["message"], 500, None)}


def _processing_status(snapshot: BatchSnapshot) -> str:
    if snapshot.record.is_over:
        return "ended"
    return "canceling" if snapshot.record.status is BatchStatus.CANCELLING else "in_progress"


def _counts(snapshot: BatchSnapshot) -> dict[str, int]:
    """Return the requests by what became of them; all of a batch that failed as a whole are errored."""
    counts, total = snapshot.progress.counts, snapshot.record.input_lines
    num_left = total - counts.num_ended
    has_failed = snapshot.record.status is BatchStatus.FAILED
    return {
        "processing": 0 if has_failed else num_left,
        "succeeded": counts.completed,
        "errored": counts.failed + (num_left if has_failed else 0),
        "canceled": counts.cancelled,
        "expired": counts.expired,
    }
