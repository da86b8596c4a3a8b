"""A client of files and batches that does not give up while the cluster is being hurt."""

import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

OVER = ("completed", "failed", "expired", "cancelled")
_RETRY_S = 0.1
T = TypeVar("T")


class BatchHttpClient:
    """Client of files and batches; every method retries for `patience_s` without an answer, or after a 5xx."""

    def __init__(self, url: str, patience_s: float = 120.0) -> None:
        self._url = url
        self._patience_s = patience_s

    def submit(self, content: bytes, endpoint: str, window: str = "24h") -> str:
        """Upload and create; the batch's id. However often it is tried, there is one batch."""
        return self.create(self.upload(content), endpoint, window)

    def upload(self, content: bytes) -> str:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        return str(self._json("POST", "/v1/files", _form(content), headers)["id"])

    def create(self, file_id: str, endpoint: str, window: str = "24h") -> str:
        asked = json.dumps({"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}).encode()
        headers = {"content-type": "application/json", "idempotency-key": uuid.uuid4().hex}
        return str(self._json("POST", "/v1/batches", asked, headers)["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        return self._json("POST", f"/v1/batches/{batch_id}/cancel", b"")

    def wait(self, batch_id: str, holds: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
        """Wait until the batch is over, or in this state. Raises TimeoutError."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            batch = self.batch(batch_id)
            if batch["status"] in OVER or (holds is not None and holds(batch)):
                return batch
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"after {self._patience_s:.0f} s still: {batch}")
            time.sleep(_RETRY_S)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a result file; empty where there is none."""
        if file_id is None:
            return []
        content = self._persistently(lambda: self._ask("GET", f"/v1/files/{file_id}/content"))
        return [json.loads(line) for line in content.splitlines()]

    def _json(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._persistently(lambda: self._ask(method, path, body, headers)))
        return answer

    def _ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
        request = urllib.request.Request(self._url + path, body, headers or {}, method=method)
        with urllib.request.urlopen(request, timeout=30.0) as response:
            content: bytes = response.read()
        return content

    def _persistently(self, ask: Callable[[], T]) -> T:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return ask()
            except (OSError, http.client.HTTPException, ValueError) as error:
                with_answer = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if with_answer or time.monotonic() > deadline_s:
                    raise
                time.sleep(_RETRY_S)


def chat_file(prompts: Sequence[tuple[str, str]], model: str, max_tokens: int = 64) -> bytes:
    """Return a file of chat lines: (custom_id, what the user says)."""
    lines = [
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
        for custom_id, text in prompts
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _form(content: bytes) -> bytes:
    parts = [b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts.append(b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n')
    return b"".join([*parts, content, b"\r\n--b--\r\n"])
