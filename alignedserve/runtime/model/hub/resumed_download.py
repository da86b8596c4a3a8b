"""Downloads of large files that go on where an earlier one ended, also when that one was killed.

huggingface_hub starts every file anew. What is here writes into its cache: a finished blob is where it looks for one,
a half has the name that its tools list and clear."""

import contextlib
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # documented

from alignedserve.core.errors import ModelError

_TIMEOUT_S = 20.0  # of silence
_MAX_FAILURES = 6  # in a row, without a byte between them
_FIRST_PAUSE_S = 0.5  # after a failure; twice as long after each further one
_POLL_S = 0.1  # while another process has the file
_GATEWAY_TIMEOUT = 504
_TEMPORARY_STATUSES = (408, 429, 500, 502, 503, _GATEWAY_TIMEOUT)
_RANGE_REFUSED = 416
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class DownloadStopped(Exception):
    """The download was told to stop; what has come is kept."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit."""

    url: str
    etag: str  # SHA-256 of what git LFS stores, otherwise git's own SHA-1
    num_bytes: int

    def __post_init__(self) -> None:
        if not _ETAG.fullmatch(self.etag):
            raise ModelError(f"{self.url}: the hub sent {self.etag[:200]!r} as its ETag, which is none.")

    def num_bytes_in(self, blobs: Path) -> int:
        for path in (blobs / self.etag, _part_of(self, blobs)):
            with contextlib.suppress(FileNotFoundError):
                return min(path.stat().st_size, self.num_bytes)
        return 0


class Download:
    """One download, into a folder of blobs. Calls `count` with the bytes of each part; a negative number takes bytes
    back. `stop` ends it from another thread."""

    def __init__(
        self, file: RemoteFile, blobs: Path, *, count: Callable[[int], None], stop: threading.Event, token: str | None
    ) -> None:
        self._file = file
        self._blob = blobs / file.etag
        self._part = _part_of(file, blobs)
        self._count = count
        self._stop = stop
        self._token = token

    def run(self) -> None:
        """Complete the file, check its digest and name it as a blob; a second process waits. Raises DownloadStopped,
        ModelError for another file, OSError of the disk, errors of httpx2 and huggingface_hub."""
        with self._locked_part() as part:
            if part is None:
                self._count(self._file.num_bytes)
                return
            num_begun = _size_of(part)
            self._count(num_begun)
            self._receive(part)
            if num_begun and not self._is_whole(part):  # the half was of something else, or damaged
                self._start_over(part)
                self._receive(part)
            if not self._is_whole(part):
                self._part.unlink()
                raise ModelError(f"{self._file.url} arrived damaged: its digest is not {self._file.etag}.")
            os.replace(self._part, self._blob)

    @contextlib.contextmanager
    def _locked_part(self) -> Iterator[BufferedRandom | None]:
        """Open the half for this process alone; None: the whole file is there. A killed process loses the lock."""
        while not self._blob.exists():
            with self._part.open("a+b") as part:
                self._wait_for_lock(part)
                if not self._blob.exists() and self._is_current(part):
                    yield part
                    return
        yield None

    def _wait_for_lock(self, part: BufferedRandom) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            self._pause(_POLL_S)

    def _is_current(self, part: BufferedRandom) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(part.fileno()), self._part.stat())
        return False

    def _receive(self, part: BufferedRandom) -> None:
        num_failures = 0
        if _size_of(part) > self._file.num_bytes:
            self._start_over(part)
        while (size := _size_of(part)) < self._file.num_bytes:
            try:
                self._request(part, size)
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if _status_of(error) == _RANGE_REFUSED:
                    self._start_over(part)
                elif _status_of(error) not in _TEMPORARY_STATUSES:
                    raise
                num_failures = 1 if _size_of(part) > size else num_failures + 1
                if num_failures > _MAX_FAILURES:
                    raise
                self._pause(_FIRST_PAUSE_S * 2 ** (num_failures - 1))

    def _request(self, part: BufferedRandom, offset: int) -> None:
        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        # Redirected to another host, as what git LFS stores is, the client leaves the token behind.
        with huggingface_hub.get_session().stream(
            "GET", self._file.url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            if offset and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                self._start_over(part)  # not the rest, but all of it
            for chunk in response.iter_bytes():  # as they come: what is gathered first would be lost with a cut
                self._pause(0.0)
                self._append(part, chunk)
        if _size_of(part) < self._file.num_bytes:
            raise httpx2.RemoteProtocolError("the answer ended early")

    def _append(self, part: BufferedRandom, chunk: bytes) -> None:
        if _size_of(part) + len(chunk) > self._file.num_bytes:
            self._start_over(part)
            raise ModelError(f"{self._file.url} sends more than the {self._file.num_bytes} bytes that the hub lists.")
        part.write(chunk)
        part.flush()
        self._count(len(chunk))

    def _start_over(self, part: BufferedRandom) -> None:
        self._count(-_size_of(part))
        part.truncate(0)

    def _is_whole(self, part: BufferedRandom) -> bool:
        part.seek(0)
        match len(self._file.etag):
            case 64:
                return hashlib.file_digest(part, "sha256").hexdigest() == self._file.etag
            case 40:
                return hashlib.file_digest(part, self._git_digest).hexdigest() == self._file.etag
        return True

    def _git_digest(self) -> Any:
        return hashlib.sha1(b"blob %d\0" % self._file.num_bytes, usedforsecurity=False)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise DownloadStopped


def _part_of(file: RemoteFile, blobs: Path) -> Path:
    return blobs / f"{file.etag}.incomplete"


def _size_of(file: BufferedRandom) -> int:
    return os.fstat(file.fileno()).st_size


def _status_of(error: Exception) -> int:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else _GATEWAY_TIMEOUT
