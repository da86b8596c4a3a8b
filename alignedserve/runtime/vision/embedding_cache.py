"""Embeddings of pictures by their keys, in a bounded number of bytes; those used least recently leave first."""

from collections import OrderedDict
from threading import Lock

from torch import Tensor


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
            found = self._embeddings.get(key)
            if found is not None:
                self._embeddings.move_to_end(key)
            return found

    def put(self, key: bytes, embeddings: Tensor) -> None:
        with self._lock:
            if key in self._embeddings or embeddings.nbytes > self._max_bytes:
                return
            self._embeddings[key] = embeddings
            self._num_bytes += embeddings.nbytes
            while self._num_bytes > self._max_bytes:
                _, gone = self._embeddings.popitem(last=False)
                self._num_bytes -= gone.nbytes
