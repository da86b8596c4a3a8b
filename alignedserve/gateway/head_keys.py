"""The keys of the head's file, at a gateway of another host: asked for through the state server.

While the head cannot be reached, the keys stay as they were.
"""

import asyncio
from collections.abc import Sequence

from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import ConfigError, StorageError
from alignedserve.keys.file import KeyRow, parse_keys
from alignedserve.messages.state import KeysRead, ReadKeys


class HeadKeys:
    """Implements KeysSource."""

    name = "the head's keys"
    look_s = 0.25

    def __init__(self, client: StateClient) -> None:
        self._client = client
        self._version = ""  # of what was taken or refused last

    async def changed(self) -> Sequence[KeyRow] | None:
        try:
            found = await self._client.call(ReadKeys(self._version), KeysRead)
            text = None if found.version in ("", self._version) else await self._whole(found)
        except StorageError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        if text is None:
            return None
        self._version = found.version
        return await asyncio.to_thread(_rows, text)

    def forget(self) -> None:
        self._version = ""

    async def _whole(self, first: KeysRead) -> bytes | None:
        text = bytearray(first.chunk)
        while len(text) < first.num_bytes:
            part = await self._client.call(ReadKeys(self._version, len(text)), KeysRead)
            if part.version != first.version or not part.chunk:
                return None
            text += part.chunk
        return bytes(text)


def _rows(text: bytes) -> Sequence[KeyRow]:
    try:
        return parse_keys(text.decode())
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"the head's keys: {error}") from error
