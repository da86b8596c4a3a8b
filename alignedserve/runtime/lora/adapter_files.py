"""The files of a PEFT folder: read once, as bytes, so that what is checked and hashed is what is used."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from alignedserve.core.errors import AdapterError
from alignedserve.core.request import ADAPTER_DIGEST_BYTES
from alignedserve.runtime.lora.adapter_config import CONFIG_NAME

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLED_NAME = "adapter_model.bin"
_MAX_CONFIG_BYTES = 4 << 20


class AdapterFiles(NamedTuple):
    """The contents of a folder."""

    folder: Path
    config: bytes
    weights: bytes

    @property
    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=ADAPTER_DIGEST_BYTES, person=b"lora adapter")
        for content in (self.config, self.weights):
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.digest()


def read_adapter_files(folder: Path, max_bytes: int) -> AdapterFiles:
    """Read a folder whose weights have at most `max_bytes`. Raises AdapterError."""
    try:
        return _files_in(folder, max_bytes)
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error.strerror}.") from error


def _files_in(folder: Path, max_bytes: int) -> AdapterFiles:
    if not (folder / WEIGHTS_NAME).is_file() and (folder / _PICKLED_NAME).exists():
        raise AdapterError(
            f"{folder} has its weights only as {_PICKLED_NAME}, a pickle format that can run code when loaded; "
            f"save them as {WEIGHTS_NAME}."
        )
    config = _read(folder / CONFIG_NAME, _MAX_CONFIG_BYTES)
    return AdapterFiles(folder, config, _read(folder / WEIGHTS_NAME, max_bytes))


def _read(path: Path, max_bytes: int) -> bytes:
    if not path.is_file():
        raise AdapterError(f"{path} does not exist, or is no file.")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise AdapterError(f"{path} is larger than {max_bytes} bytes.")
    return content
