"""Finished requests on the disk, from which a length predictor learns again when its process or its host is another.

A file of records of one size, each with its checksum: what the predictor learns from, and no token of any prompt. It is
not synced: a host that loses power loses the youngest. When it is full it becomes the old one, and the older is gone.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams
from router.prediction.encoders import KEY_LEN, PromptCode

logger = logging.getLogger(__name__)

_VERSION = 1
_MAX_RECORDS = 2048  # of one file; there are two
_CLASSES = tuple(RequestClass)
_HALF = np.dtype("<f2")

Records = npt.NDArray[np.void]


class LearntRequest(NamedTuple):
    """A request that has finished."""

    request: Request  # what the predictor reads: the length, with other tokens
    code: PromptCode
    num_generated: int


class LearntLengths:
    """The journal of one predictor, for one thread. Errors of the disk end it, and are said once."""

    def __init__(self, folder: Path, *, encoder: str, num_features: int) -> None:
        self._path = folder / "learnt_lengths"
        self._old = folder / "learnt_lengths.old"
        self._dtype = np.dtype(
            [
                ("digest", "<u8"),
                ("request_class", "u1"),
                ("lens", "<u4", (3,)),  # prompt, limit, generated
                ("features", _HALF, (num_features,)),
                ("key", _HALF, (KEY_LEN,)),
            ]
        )
        named = xxhash.xxh3_128_hexdigest(f"{_VERSION} {encoder} {num_features} {KEY_LEN}".encode())
        self._head = f"alignedserve lengths {named}\n".encode()
        self._file: int | None = None
        self._num_records = 0

    def open(self) -> Iterator[LearntRequest]:
        """Yield what is there, oldest first, and be ready to `append` after the last."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logs = [self._records(path) for path in (self._old, self._path)]
            self._begin(logs[1])
        except OSError as error:
            self._give_up(error)
            return
        for records in logs:
            for record in records:
                yield self._decode(record)

    def append(self, learnt: LearntRequest) -> None:
        if self._file is None:
            return
        try:
            if self._num_records >= _MAX_RECORDS:
                self._turn_over()
            _write(self._file, self._encode(learnt))
            self._num_records += 1
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, records: Records) -> None:
        assert self._file is not None, "a journal begun before it was opened"
        os.ftruncate(self._file, 0)
        _write(self._file, self._head + records.tobytes())
        os.lseek(self._file, 0, os.SEEK_END)
        self._num_records = len(records)

    def _turn_over(self) -> None:
        assert self._file is not None, "a journal turned over before it was opened"
        os.replace(self._path, self._old)
        os.close(self._file)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(self._file, self._head)
        self._num_records = 0

    def _records(self, path: Path) -> Records:
        try:
            with path.open("rb") as file:
                content = file.read(len(self._head) + _MAX_RECORDS * self._dtype.itemsize)
        except FileNotFoundError:
            content = b""
        if not content.startswith(self._head):
            content = self._head
        whole = (len(content) - len(self._head)) // self._dtype.itemsize
        records = np.frombuffer(content, self._dtype, whole, len(self._head))
        is_valid = [self._is_valid(record) for record in records]
        valid: Records = records[np.array(is_valid, bool)]
        return valid

    def _is_valid(self, record: np.void) -> bool:
        is_known = int(record["request_class"]) < len(_CLASSES) and 0 < int(record["lens"][0]) < 1 << 20
        finite = bool(np.isfinite(record["features"]).all() and np.isfinite(record["key"]).all())
        return int(record["digest"]) == _digest(record) and is_known and finite

    def _encode(self, learnt: LearntRequest) -> bytes:
        request, code, num_generated = learnt
        record = np.zeros(1, self._dtype)
        record["request_class"] = _CLASSES.index(request.request_class)
        record["lens"] = (request.prompt_len, request.sampling.max_tokens, num_generated)
        record["features"], record["key"] = code.features, code.key
        record["digest"] = _digest(record[0])
        return record.tobytes()

    def _decode(self, record: np.void) -> LearntRequest:
        prompt_len, limit, num_generated = (int(length) for length in record["lens"])
        request = Request(
            RequestId("learnt"),
            (0,) * prompt_len,
            SamplingParams(max_tokens=limit),
            "",
            0.0,
            request_class=_CLASSES[int(record["request_class"])],
        )
        code = PromptCode(record["features"].astype(np.float32), record["key"].astype(np.float32))
        return LearntRequest(request, code, num_generated)

    def _give_up(self, error: OSError) -> None:
        logger.warning("%s: what is learnt from now on ends with this process: %s", self._path, error)
        self.close()


def _write(file_descriptor: int, content: bytes) -> None:
    if os.write(file_descriptor, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _digest(record: np.void) -> int:
    return xxhash.xxh3_64_intdigest(record.tobytes()[8:])
