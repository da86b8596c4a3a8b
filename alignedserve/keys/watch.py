"""Keeps the keys of a process as their source has them; where that is bad, the old ones go on."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from alignedserve.core.errors import ConfigError
from alignedserve.disk.durable import LastSeen
from alignedserve.keys.file import KeyRow, read_keys, ring_of
from alignedserve.keys.ring import CurrentKeys, KeyRing
from alignedserve.keys.shared import SharedKeys

logger = logging.getLogger(__name__)


class KeysSource(Protocol):
    """Where keys come from."""

    name: str  # in the log
    look_s: float  # between looks

    async def changed(self) -> Sequence[KeyRow] | None:
        """Return the keys if they are others than at the last look. Raises ConfigError where they are bad or away."""

    def forget(self) -> None:
        """Let the next look find other keys, whatever it sees. From any thread."""


class KeysFile:
    """Implements KeysSource: keys.yaml on this host."""

    look_s = 0.1

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file = LastSeen(path)
        self._was_read = False
        self._is_awaited = False

    async def changed(self) -> Sequence[KeyRow] | None:
        return await asyncio.to_thread(self._changed)  # a disk may take its time

    def forget(self) -> None:
        self._file.forget()

    def _changed(self) -> Sequence[KeyRow] | None:
        has_changed = self._file.has_changed()
        self._is_awaited |= has_changed
        if not self._is_awaited or (has_changed and self._was_read):
            return None
        self._was_read, self._is_awaited = True, False
        return read_keys(self._path)


class KeysWatch:
    """Gives a process other keys whenever its source has others."""

    def __init__(
        self, keys: CurrentKeys, plain: Sequence[str], source: KeysSource | None, shared: SharedKeys | None = None
    ) -> None:
        """`keys`: that follow. `source`: None: there is none, and the plain keys are all. `shared`: follows, too."""
        self._keys = keys
        self._plain = tuple(plain)
        self._source = source
        self._shared = shared
        self._problem = ""  # that was told last
        keys.ring = ring_of(self._plain, None if source is None else ())  # with a source, nobody else may call

    async def look(self) -> bool:
        """Take the keys if they are others than before; return whether they are.

        What is wrong with them is logged, once.
        """
        if self._source is None:
            return False
        try:
            rows = await self._source.changed()
            ring = None if rows is None else await asyncio.to_thread(self._take, rows)
        except ConfigError as error:
            self._tell(str(error))
            return False
        self._problem = ""
        if ring is None:
            return False
        self._keys.ring = ring
        logger.info("%s: %d keys", self._source.name, len(ring))
        return True

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while self._source is not None:
            await asyncio.sleep(self._source.look_s)
            await self.look()

    def read_again(self) -> None:
        """Take the keys at the next look, also where they seem to be the same. From any thread."""
        if self._source is not None:
            self._source.forget()

    def _take(self, rows: Sequence[KeyRow]) -> KeyRing:
        if self._shared is not None:
            self._shared.take(rows)
        return ring_of(self._plain, rows)

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("the keys stay as they were: %s", problem)
        self._problem = problem
