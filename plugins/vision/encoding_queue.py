"""Pictures that wait for the encoder, and its passes, divided into turns between iterations.

A thread chooses before every turn: pictures that somebody waits for go first, then those that came first. So a picture
of a chat overtakes one of a document within a turn. While the worker has real-time sequences, a document's picture gets
single steps, and a rest after each, so that it takes a tenth of the time.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Lock

import torch
from torch import Tensor

from alignedserve.core.picture import Picture
from alignedserve.runtime.pictures import TakeTurn
from plugins.vision.tower import Steps

_RESTS = 9  # after a step of a document's picture, of the step's time

logger = logging.getLogger(f"alignedserve.{__name__}")

Passes = Callable[[Picture], Sequence[Steps]]  # decodes a picture; raises PictureError


class EncodingRun:
    """The passes of one picture, part by part."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        self._parts = list(parts)
        self._results: list[Tensor] = []

    @property
    def result(self) -> Tensor:
        """Return the embeddings [tokens, width], once a turn has ended the last pass."""
        assert not self._parts, "a pass that has not ended"
        return torch.cat(self._results)

    @torch.inference_mode()
    def turn(self, turn_s: float) -> bool:
        """Take a step, and more for a while; return whether all passes have ended."""
        ends = time.perf_counter() + turn_s
        while self._parts:
            try:
                next(self._parts[0])
            except StopIteration as ended:
                self._results.append(ended.value)
                del self._parts[0]
            if time.perf_counter() >= ends:
                break
        return not self._parts


class _Job:
    def __init__(self, picture: Picture, number: int) -> None:
        self.picture = picture
        self.number = number
        self.is_real_time = False
        self.run: EncodingRun | None = None  # None: it is not decoded yet
        self.result: Future[Tensor] = Future()


class EncodingQueue:
    """Encodes pictures, each once however many wait for it."""

    def __init__(self, passes: Passes, take_turn: TakeTurn, has_real_time: Callable[[], bool]) -> None:
        """`take_turn`: does one turn on the thread that computes, once what waits there before it is done;
        `has_real_time`: somebody waits for a sequence of the worker."""
        self._passes, self._take_turn, self._has_real_time = passes, take_turn, has_real_time
        self._jobs: dict[bytes, _Job] = {}
        self._num_jobs = 0
        self._lock, self._came, self._is_closed = Lock(), Event(), False
        self._thread = ThreadPoolExecutor(1, "pictures")

    def add(self, key: bytes, picture: Picture, *, is_real_time: bool) -> "Future[Tensor]":
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                self._num_jobs += 1
                job = self._jobs[key] = _Job(picture, self._num_jobs)
                self._thread.submit(self._work)
            job.is_real_time |= is_real_time
        if is_real_time:
            self._came.set()
        return job.result

    def close(self) -> None:
        self._is_closed = True
        self._came.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- on the thread

    def _work(self) -> None:
        while not self._is_closed:
            with self._lock:
                self._came.clear()
                if not self._jobs:
                    return
                key, job = min(self._jobs.items(), key=lambda entry: (not entry[1].is_real_time, entry[1].number))
            try:
                is_done = self._advance(job)
            except Exception as error:  # noqa: BLE001  (whoever waits for it is told)
                self._end(key)
                job.result.set_exception(error)
                continue
            if is_done and job.run is not None:
                self._end(key)
                job.result.set_result(job.run.result)

    def _advance(self, job: _Job) -> bool:
        if job.run is None:
            job.run = EncodingRun(self._passes(job.picture))
            return False
        run, is_real_time = job.run, job.is_real_time
        gives_way = not is_real_time and self._has_real_time()
        began = time.perf_counter()
        is_done = self._take_turn(lambda turn_s: run.turn(0.0 if gives_way else turn_s), is_real_time).result()
        if gives_way and not is_done:
            self._came.wait(_RESTS * (time.perf_counter() - began))
        return is_done

    def _end(self, key: bytes) -> None:
        with self._lock:
            del self._jobs[key]
