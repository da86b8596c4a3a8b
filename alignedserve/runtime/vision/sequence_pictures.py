"""The pictures of a worker's requests, from the messages that announce them to the tokens that read their embeddings.

The life of a picture:
1. A request comes with its file. A thread lets the process for it decode the file and make pixels of it.
2. The encoder's pass is divided into turns on the thread that computes iterations: one turn, of about `TURN_S`, between
   two iterations. So an iteration waits for a turn at most, however large the picture is.
3. Its embeddings are cached by the file's digest, for those who share blocks of the prefix cache. The request waits for
   them, and others do not.
4. A sequence that is added gets the embeddings of the positions that are to be computed. If they have left the cache
   by then, they are computed at once, within that iteration.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.picture import Picture
from alignedserve.core.request import Request
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.pictures.decoder import PictureDecoder
from alignedserve.runtime.vision.embedding_cache import EmbeddingCache
from alignedserve.runtime.vision.picture_rows import SequenceEmbeddings
from alignedserve.runtime.vision.tower import Steps, VisionTower

TURN_S = 0.02  # of an encoder's pass between two iterations; it ends after the step that reaches this
logger = logging.getLogger(__name__)

Turn = Callable[[], bool]  # does a part of the work; returns whether it is done


class Pictures(Protocol):
    """What an executor uses of SequencePictures, or of NoPictures."""

    def prepare(self, message: Message) -> "Sequence[Future[None]]":
        """Begin to encode the pictures that a message brings; return what its requests wait for."""

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        """Return the embeddings of a sequence that is added; None: it needs none from `num_cached` on, or fails."""

    def remove(self, request_id: RequestId) -> None:
        """Forget a sequence that is removed."""

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        """Return which of these sequences lack their pictures, and why."""

    def close(self) -> None:
        """End the process that decodes, and the thread that waits for it."""


class NoPictures:
    """Of a model that does not see. A request with pictures fails: the gateway has let none pass."""

    def __init__(self) -> None:
        self._failures: dict[RequestId, str] = {}

    def prepare(self, message: Message) -> "Sequence[Future[None]]":
        """See Pictures."""
        return ()

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        """See Pictures."""
        if request.pictures:
            self._failures[request.request_id] = "this worker's model does not see pictures"
        return None

    def remove(self, request_id: RequestId) -> None:
        """See Pictures."""
        self._failures.pop(request_id, None)

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        """See Pictures."""
        if not self._failures:
            return {}
        return {request_id: self._failures[request_id] for request_id in request_ids if request_id in self._failures}

    def close(self) -> None:
        """See Pictures."""


class SequencePictures(NoPictures):
    """Decodes, encodes and lends."""

    def __init__(self, tower: VisionTower, *, cache_bytes: int, take_turn: Callable[[Turn], "Future[bool]"]) -> None:
        """`take_turn`: does one turn on the thread that computes, once what waits there before it is done."""
        super().__init__()
        self._tower = tower
        self._take_turn = take_turn
        self._decoder = PictureDecoder()
        self._cache = EmbeddingCache(cache_bytes)
        self._thread = ThreadPoolExecutor(1, "pictures")
        self._encoding: dict[bytes, Future[None]] = {}  # pictures that are being encoded, or wait for it
        self._lock = Lock()

    def prepare(self, message: Message) -> "Sequence[Future[None]]":
        """See Pictures. Of requests whose prompts others have computed nothing is begun."""
        if not isinstance(message, PrefillRequest):
            return ()
        request = message.request
        return [self._begin(picture, _owner_of(request) + picture.digest) for picture in request.pictures]

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        """See Pictures."""
        parts: list[Tensor] = []
        places: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        for picture in request.pictures:
            positions = np.array(picture.positions, np.int64)
            if positions[-1] < num_cached:
                continue
            try:
                embeddings = self._embeddings(picture, _owner_of(request) + picture.digest)
            except InvalidRequest as error:
                self._failures[request.request_id] = str(error)
                return None
            if len(embeddings) != len(positions):
                self._failures[request.request_id] = "a picture has another number of tokens than its prompt"
                return None
            parts.append(embeddings)
            places.append(positions)
        return SequenceEmbeddings(np.concatenate(places), torch.cat(parts)) if parts else None

    def close(self) -> None:
        """See Pictures."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._decoder.close()

    def _begin(self, picture: Picture, key: bytes) -> "Future[None]":
        with self._lock:
            running = self._encoding.get(key)
            if running is not None:
                return running
            if self._cache.get(key) is not None:
                done: Future[None] = Future()
                done.set_result(None)
                return done
            begun = self._encoding[key] = self._thread.submit(self._encode, picture, key)
        begun.add_done_callback(partial(self._end, key))
        return begun

    def _end(self, key: bytes, begun: "Future[None]") -> None:
        with self._lock:
            self._encoding.pop(key, None)
        if not begun.cancelled() and begun.exception() is not None:  # it fails again, by name, as it is added
            logger.warning("a picture was not encoded ahead: %s", begun.exception())

    def _encode(self, picture: Picture, key: bytes) -> None:
        """Encode a picture in turns; on the thread of pictures."""
        passes = self._passes(picture)
        embeddings = []
        for steps in passes:
            run = _Pass(steps)
            while not self._take_turn(run.turn).result():
                pass
            embeddings.append(run.result)
        self._cache.put(key, torch.cat(embeddings))

    def _embeddings(self, picture: Picture, key: bytes) -> Tensor:
        """Return the embeddings, computed at once if need be. Raises InvalidRequest."""
        found = self._cache.get(key)
        if found is not None:
            return found
        runs = [_Pass(steps, turn_s=float("inf")) for steps in self._passes(picture)]
        for run in runs:
            run.turn()
        embeddings = torch.cat([run.result for run in runs])
        self._cache.put(key, embeddings)
        return embeddings

    def _passes(self, picture: Picture) -> list[Steps]:
        parts = self._decoder.parts(picture.content, self._tower.config.form)
        return [self._tower.steps(part) for part in parts]


def _owner_of(request: Request) -> bytes:
    """Return whose pictures a request shares: as of blocks of the prefix cache, lest others can probe for them."""
    return request.prefix_root or request.tenant.encode("utf-8", "surrogatepass")


class _Pass:
    """The pass of one part of a picture."""

    def __init__(self, steps: Steps, turn_s: float = TURN_S) -> None:
        self._steps = steps
        self._turn_s = turn_s
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """Return the embeddings, once a turn has ended the pass."""
        assert self._result is not None, "a pass that has not ended"
        return self._result

    @torch.inference_mode()
    def turn(self) -> bool:
        """Take steps for a while; return whether the pass has ended."""
        ends = time.perf_counter() + self._turn_s
        try:
            next(self._steps)
            while time.perf_counter() < ends:
                next(self._steps)
        except StopIteration as ended:
            self._result = ended.value
            return True
        return False
