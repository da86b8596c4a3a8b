"""The lines of output and error files, in OpenAI's shapes."""

import orjson

from alignedserve.batches.interfaces import LineAnswer
from alignedserve.batches.log.log_format import LineEnd, ResultRecord
from alignedserve.batches.records import BatchKey

_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
_CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")


def answered(batch_id: BatchKey, line: int, custom_id: str, request_id: str, answer: LineAnswer) -> ResultRecord:
    """The record of a line that has its answer, of whatever status."""
    response = {
        "status_code": answer.status_code,
        "request_id": request_id,
        "body": orjson.Fragment(answer.body),
    }
    end = LineEnd.COMPLETED if answer.is_success else LineEnd.FAILED
    payload = _payload(batch_id, line, custom_id, response, None)
    return ResultRecord(line, end, payload, answer.input_tokens, answer.output_tokens)


def broken(batch_id: BatchKey, line: int, custom_id: str, reason: str) -> ResultRecord:
    """The record of a line that was tried often enough."""
    return _without_answer(batch_id, line, custom_id, LineEnd.FAILED, "request_failed", reason)


def to_be_tried_again(line: int) -> ResultRecord:
    """The record of a try that came to nothing: it counts in the driver's next life too."""
    return ResultRecord(line, LineEnd.BROKE, b"")


def expired(batch_id: BatchKey, line: int, custom_id: str) -> ResultRecord:
    """The record of a line whose time was over."""
    return _without_answer(batch_id, line, custom_id, LineEnd.EXPIRED, *_EXPIRED)


def cancelled(batch_id: BatchKey, line: int, custom_id: str) -> ResultRecord:
    """The record of a line that nobody wants any more."""
    return _without_answer(batch_id, line, custom_id, LineEnd.CANCELLED, *_CANCELLED)


def _without_answer(
    batch_id: BatchKey, line: int, custom_id: str, end: LineEnd, code: str, message: str
) -> ResultRecord:
    error = {"code": code, "message": message}
    return ResultRecord(line, end, _payload(batch_id, line, custom_id, None, error))


def _payload(batch_id: BatchKey, line: int, custom_id: str, response: object, error: object) -> bytes:
    result = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}{line:06x}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(result)
