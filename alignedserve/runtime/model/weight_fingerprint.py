"""Tells the weights that a cluster began to serve from others that have taken their place on disk since.

A worker that starts again would load those: what it answered then, also to requests that another worker began, would
be of another model. A fingerprint is of the names and sizes of the files and of samples of their bytes: it takes a
fraction of a second, and is the same on every host with a copy.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import is_gguf, part_names
from alignedserve.runtime.model.model_files import check_weight_files
from alignedserve.runtime.model.weight_index import listed_shards

_NUM_SAMPLES = 256  # of all files together, evenly spaced: a layer of a hundred has some; each is a read over a network
_SAMPLE_BYTES = 4096
_HEADER_BYTES = 1 << 16  # read of each file, beside the samples


def fingerprint_of(path: Path) -> str:
    """Return the fingerprint of the weights in a folder or GGUF file; empty: they cannot be read."""
    digest = hashlib.sha256()
    try:
        files = _files_of(path)
        for file in files:
            digest.update(file.name.encode())
            for part in _samples_of(file, max(_NUM_SAMPLES // len(files), 2)):
                digest.update(part)
    except (ModelError, OSError):
        return ""
    return digest.hexdigest()


@contextmanager
def unchanged_weights(path: Path, fingerprint: str) -> Iterator[None]:
    """Load weights inside the `with` block. Raises ModelError before or after it if they are others than these.

    `fingerprint`: empty: any will do.
    """
    _require_same(path, fingerprint)
    yield
    _require_same(path, fingerprint)


def _require_same(path: Path, fingerprint: str) -> None:
    if fingerprint and fingerprint_of(path) != fingerprint:
        check_weight_files(path)  # what is missing or cut off is named
        raise ModelError(
            f"{path}: these are not the weights with which the model began to be served; put those back, or serve "
            "the new ones in their place with `alignedserve models replace`."
        )


def _files_of(path: Path) -> list[Path]:
    return [path.with_name(name) for name in part_names(path.name)] if is_gguf(path) else listed_shards(path)


def _samples_of(path: Path, num_samples: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        yield size.to_bytes(8, "little")
        yield os.pread(file.fileno(), _HEADER_BYTES, 0)
        for place in range(1, num_samples + 1):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, max(size * place // num_samples - _SAMPLE_BYTES, 0))
