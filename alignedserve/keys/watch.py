"""Keeps the keys of a process as the file has them; where that is bad, the old ones go on."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from alignedserve.core.errors import ConfigError
from alignedserve.keys.file import KeysSignature, read_keys, ring_of, signature_of
from alignedserve.keys.ring import CurrentKeys

logger = logging.getLogger(__name__)

_LOOK_S = 0.25


class KeysWatch:
    """Reads keys from a file again whenever that is another one."""

    def __init__(self, keys: CurrentKeys, plain: Sequence[str], path: Path | None) -> None:
        """`keys`: that follow. `path`: None: there is no file, and the plain keys are all."""
        self._keys = keys
        self._plain = tuple(plain)
        self._path = path
        self._read: KeysSignature | None = None
        self._problem = ""  # that was told last
        keys.ring = ring_of(self._plain, None if path is None else ())  # with a file, nobody else may call

    def look(self) -> bool:
        """Read the file if it is another one than before; return whether the keys are new.

        What is wrong with it is logged, once.
        """
        if self._path is None:
            return False
        try:
            signature = signature_of(self._path)
            if signature == self._read:
                return False
            self._read = signature
            ring = ring_of(self._plain, read_keys(self._path))
        except ConfigError as error:
            self._tell(str(error))
            return False
        self._problem = ""
        self._keys.ring = ring
        logger.info("%s: %d keys", self._path, len(ring))
        return True

    async def run(self) -> None:
        """Look again and again, beside the event loop, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self.look)

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("the keys stay as they were: %s", problem)
        self._problem = problem
