"""The head's keys for gateways of other hosts: as a text of checked rows, without what else their file says."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.core.errors import ConfigError
from alignedserve.keys.entry import MAX_KEYS_BYTES
from alignedserve.keys.file import KeyRow, render_keys


class KeysText(NamedTuple):
    """A text of keys and its name, which tells it from every other one."""

    version: str = ""  # empty: there were no good keys yet
    content: bytes = b""


class SharedKeys:
    """The text of the keys of now; any thread may change it."""

    def __init__(self) -> None:
        self.now = KeysText()

    def take(self, rows: Sequence[KeyRow]) -> None:
        """Share these keys from now on. Raises ConfigError if they are too many."""
        content = render_keys(rows).encode()
        if len(content) > MAX_KEYS_BYTES:
            raise ConfigError(f"the keys are larger than {MAX_KEYS_BYTES >> 20} MiB without aliases")
        self.now = KeysText(hashlib.sha256(content).hexdigest(), content)
