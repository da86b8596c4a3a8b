"""Batches, files and lines for tests."""

import json
from typing import Any

from alignedserve.batches.records import BatchKey, BatchRecord, Endpoint, FileId, FileRecord

BATCH = BatchKey("batch_" + "0" * 24)
INPUT, OUTPUT, ERRORS = (FileId(f"file-{digit * 24}") for digit in "123")


def batch_record(**fields: Any) -> BatchRecord:
    defaults: dict[str, Any] = {
        "batch_id": BATCH,
        "owner": "anyone",
        "endpoint": Endpoint.CHAT,
        "input_file_id": INPUT,
        "output_file_id": OUTPUT,
        "error_file_id": ERRORS,
        "completion_window": "24h",
        "created_s": 1.0,
        "expires_s": 86_401.0,
        "output_lifetime_s": None,
        "input_bytes": 1000,
        "input_lines": 10,
        "fingerprint": "",
    }
    return BatchRecord(**(defaults | fields))


def file_record(**fields: Any) -> FileRecord:
    defaults: dict[str, Any] = {
        "file_id": INPUT,
        "owner": "anyone",
        "name": "in.jsonl",
        "purpose": "batch",
        "num_bytes": 1000,
        "num_lines": 10,
        "created_s": 1.0,
    }
    return FileRecord(**(defaults | fields))


def chat_line(custom_id: Any = "a", *, content: str = "hello", url: str = "/v1/chat/completions", **body: Any) -> bytes:
    """Return a line that is fine, unless told otherwise."""
    call = {"model": "tiny", "messages": [{"role": "user", "content": content}], **body}
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": call}
    return json.dumps(line).encode()


def chat_lines(count: int, **body: Any) -> bytes:
    """Return a file of as many lines."""
    return b"".join(chat_line(f"line-{number}", **body) + b"\n" for number in range(count))
