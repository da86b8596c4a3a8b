"""A tokenizer that is read when it is first used, by processes that may never need it: it takes tens of megabytes."""

from collections.abc import Callable
from threading import Lock
from typing import Any

from alignedserve.text.tokenizer import Tokenizer


class TokenizerOnUse(Tokenizer):
    """A tokenizer that is read by `read`, or else by the first method that needs it."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._lock = Lock()
        self._is_read = False

    def read(self) -> None:
        """Read it, unless it has been. Raises ModelError."""
        with self._lock:
            if not self._is_read:
                vars(self).update(vars(self._load()))
                self._is_read = True

    def __getattr__(self, name: str) -> Any:
        """Return what only a tokenizer that has been read has. Raises ModelError."""
        if name.startswith("__") or self._is_read:
            raise AttributeError(name)
        self.read()
        return getattr(self, name)
