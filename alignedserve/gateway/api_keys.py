"""Authentication: the key that a request presents, or for which its token stands; the keys of the head's file."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from alignedserve.api.errors import Unauthorized
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import ConfigError, StorageError
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.keys.file import KeyRow, parse_keys
from alignedserve.keys.ring import CurrentKeys
from alignedserve.messages.state import KeysRead, ReadKeys

PUBLIC_PATHS = frozenset({"/", "/dashboard", "/health", "/ready", "/version"})
_PAGE_FILES = "/page/"
_DOTS = 2  # of a token, which no secret has


class Tokens(Protocol):
    """Tokens that stand for keys of keys.yaml: of the plugin `jwt`, where the configuration names issuers."""

    async def start(self) -> None:
        """Fetch what tokens are verified with, and again from time to time; return after the first attempt."""

    def stop(self) -> None:
        """Fetch no more. May be repeated."""

    def remembered(self, token: str) -> str | None:
        """Return the key's name of a token that was verified before and still holds."""

    async def key_name(self, token: str) -> str:
        """Return the key's name of a token. Raises Unauthorized, or Unavailable while its issuer's keys are unknown."""


class ApiKeys:
    """Checks keys against those of now. Without keys all clients are one."""

    def __init__(
        self,
        keys: CurrentKeys,
        tokens: Tokens | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`tokens`: None: no token stands for a key. `clock`: Unix time."""
        self._keys = keys
        self._tokens = tokens
        self._clock = clock

    @property
    def are_none(self) -> bool:
        return self._keys.ring.is_open

    def known(self, presented_key: str | None) -> KeyEntry | None:
        """Return the entry of a key that takes a look-up by its digest alone: of a secret, or of a token that was
        verified before. None: it is neither."""
        entry = self._keys.ring.find(presented_key, self._clock())
        if entry is None and self._tokens is not None and presented_key is not None:
            name = self._tokens.remembered(presented_key)
            return None if name is None else self._keys.ring.named(name)
        return entry

    async def authenticate(self, path: str, presented_key: str | None) -> KeyEntry:
        """Return the entry of the client's key. Raises Unauthorized; PUBLIC_PATHS and the page's files need none.

        For a token, Unavailable while its issuer's keys are unknown.
        """
        if path in PUBLIC_PATHS or path.startswith(_PAGE_FILES):
            return ANYONE
        entry = self.known(presented_key)
        if entry is not None:
            return entry
        if self._tokens is not None and presented_key is not None and presented_key.count(".") == _DOTS:
            entry = self._keys.ring.named(await self._tokens.key_name(presented_key))
            if entry is None:
                raise Unauthorized("The token stands for a key that is not here, or that is revoked.")
            return entry
        raise Unauthorized("A valid API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")


class HeadKeys:
    """Implements KeysSource."""

    name = "the head's keys"
    look_s = 0.25

    def __init__(self, client: StateClient) -> None:
        self._client = client
        self._version = ""  # of what was taken or refused last

    async def changed(self) -> Sequence[KeyRow] | None:
        try:
            answer = await self._client.call(ReadKeys(self._version), KeysRead)
            text = None if answer.version in ("", self._version) else await self._whole(answer)
        except StorageError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        if text is None:
            return None
        self._version = answer.version
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
