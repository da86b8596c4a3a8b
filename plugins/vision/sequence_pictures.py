"""The pictures of a worker's requests, from the messages that announce them to the tokens that read their embeddings.

The life of a picture:
1. A request comes with its file. A process decodes the file and makes pixels of it.
2. The encoder's pass is divided into turns on the thread that computes iterations, one between two of them
   (encoding_queue.py). So an iteration waits for a turn at most, however large the picture is.
3. Its embeddings are cached by the file's digest, for those who share blocks of the prefix cache. The request waits for
   them, and others do not.
4. A sequence that is added gets the embeddings of the positions that are to be computed. If they have left the cache
   by then, they are computed at once, within that iteration.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import Picture
from alignedserve.core.request import Request
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.runtime.pictures import FailedSequences, IntArray, SequenceEmbeddings, TakeTurn
from plugins.vision.decoder import PictureDecoder
from plugins.vision.encoding_queue import EncodingQueue, EncodingRun
from plugins.vision.mobile_tower import MobileTower
from plugins.vision.tower import Steps, VisionTower


class EmbeddingCache:
    """Safe to share between threads. What is in use stays with its users when it has left the cache."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._embeddings: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def get(self, key: bytes) -> Tensor | None:
        """Return the embeddings [tokens, width] of a picture; None: they are not there."""
        with self._lock:
            embeddings = self._embeddings.get(key)
            if embeddings is not None:
                self._embeddings.move_to_end(key)
            return embeddings

    def put(self, key: bytes, embeddings: Tensor) -> None:
        with self._lock:
            if key in self._embeddings or embeddings.nbytes > self._max_bytes:
                return
            self._embeddings[key] = embeddings
            self._num_bytes += embeddings.nbytes
            while self._num_bytes > self._max_bytes:
                _, gone = self._embeddings.popitem(last=False)
                self._num_bytes -= gone.nbytes


logger = logging.getLogger(f"alignedserve.{__name__}")


class SequencePictures(FailedSequences):
    """Decodes, encodes and lends."""

    def __init__(
        self,
        tower: VisionTower | MobileTower,
        *,
        cache_bytes: int,
        take_turn: TakeTurn,
        has_real_time: Callable[[], bool],
    ) -> None:
        """`take_turn`, `has_real_time`: as of EncodingQueue."""
        super().__init__()
        self._tower = tower
        self._decoder = PictureDecoder()
        self._cache = EmbeddingCache(cache_bytes)
        self._queue = EncodingQueue(self._passes, take_turn, has_real_time)

    def prepare(self, message: Message) -> "Sequence[Future[Any]]":
        if not isinstance(message, PrefillRequest):
            return ()
        begun = [self._begin(message.request, picture) for picture in message.request.pictures]
        return [future for future in begun if future is not None]

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        parts: list[Tensor] = []
        places: list[IntArray] = []
        for picture in request.pictures:
            positions = np.array(picture.positions, np.int64)
            if positions[-1] < num_cached:
                continue
            try:
                embeddings = self._embeddings(picture, _key_of(request, picture))
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
        self._queue.close()
        self._decoder.close()

    def _begin(self, request: Request, picture: Picture) -> "Future[Tensor] | None":
        key = _key_of(request, picture)
        if self._cache.get(key) is not None:
            return None
        begun = self._queue.add(key, picture, is_real_time=request.is_real_time)
        begun.add_done_callback(partial(self._keep, key))
        return begun

    def _keep(self, key: bytes, begun: "Future[Tensor]") -> None:
        error = begun.exception()
        if error is None:
            self._cache.put(key, begun.result())
        else:  # it fails again, by name, as it is added
            logger.warning("a picture was not encoded ahead: %s", error)

    def _embeddings(self, picture: Picture, key: bytes) -> Tensor:
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        run = EncodingRun(self._passes(picture))
        run.turn(float("inf"))
        self._cache.put(key, run.result)
        return run.result

    def _passes(self, picture: Picture) -> list[Steps]:
        parts = self._decoder.parts(picture.content, self._tower.config.form)
        return [self._tower.steps(part) for part in parts]


def _key_of(request: Request, picture: Picture) -> bytes:
    return (request.prefix_root or request.tenant.encode("utf-8", "surrogatepass")) + picture.digest
