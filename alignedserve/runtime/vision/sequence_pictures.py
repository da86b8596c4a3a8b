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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
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
from alignedserve.runtime.vision.encoding_queue import EncodingQueue, EncodingRun, TakeTurn
from alignedserve.runtime.vision.mobile_tower import MobileTower
from alignedserve.runtime.vision.picture_rows import IntArray, SequenceEmbeddings
from alignedserve.runtime.vision.tower import Steps, VisionTower

logger = logging.getLogger(__name__)


class Pictures(Protocol):
    """What an executor uses of SequencePictures, or of NoPictures."""

    def prepare(self, message: Message) -> "Sequence[Future[Any]]":
        """Begin to encode the pictures that a message brings; return what its requests wait for."""

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        """Return the embeddings of a sequence that is added; None: it needs none from `num_cached` on, or fails."""

    def remove(self, request_id: RequestId) -> None:
        """Forget a sequence that is removed."""

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        """Return which of these sequences lack their pictures, and why."""

    def close(self) -> None:
        """End the process that decodes, and the thread that waits for it."""


class _FailedSequences:
    def __init__(self) -> None:
        self._failures: dict[RequestId, str] = {}

    def remove(self, request_id: RequestId) -> None:
        self._failures.pop(request_id, None)

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        if not self._failures:
            return {}
        return {request_id: self._failures[request_id] for request_id in request_ids if request_id in self._failures}


class NoPictures(_FailedSequences):
    """Of a model that does not see. A request with pictures fails: the gateway has let none pass."""

    def prepare(self, message: Message) -> "Sequence[Future[Any]]":
        return ()

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        if request.pictures:
            self._failures[request.request_id] = "this worker's model does not see pictures"
        return None

    def close(self) -> None: ...


class SequencePictures(_FailedSequences):
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
        """Of requests whose prompts others have computed nothing is begun."""
        if not isinstance(message, PrefillRequest):
            return ()
        begun = [self._begin(message.request, picture) for picture in message.request.pictures]
        return [one for one in begun if one is not None]

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
        found = self._cache.get(key)
        if found is not None:
            return found
        run = EncodingRun(self._passes(picture))
        run.turn(float("inf"))
        self._cache.put(key, run.result)
        return run.result

    def _passes(self, picture: Picture) -> list[Steps]:
        parts = self._decoder.parts(picture.content, self._tower.config.form)
        return [self._tower.steps(part) for part in parts]


def _key_of(request: Request, picture: Picture) -> bytes:
    return (request.prefix_root or request.tenant.encode("utf-8", "surrogatepass")) + picture.digest
