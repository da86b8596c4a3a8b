"""Contents in a folder, opened when they are there, missing, or out of reach for a while."""

import os
import resource
from pathlib import Path

import pytest

from alignedserve.batches.records import FileId
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.core.errors import StorageDamaged, StorageError

FILE = FileId("file-" + "0" * 24)


async def test_a_content_that_is_missing_is_damage(tmp_path: Path) -> None:
    with pytest.raises(StorageDamaged):
        await DiskBlobs(tmp_path).open(FILE)


async def test_a_content_that_cannot_be_opened_now_is_no_damage(tmp_path: Path) -> None:
    """A batch whose file is damaged fails for good; without file descriptors it only waits."""
    blobs = DiskBlobs(tmp_path)
    (tmp_path / FILE).write_bytes(b"{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(StorageError) as refused:
            await blobs.open(FILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(refused.value, StorageDamaged)
    reader = await blobs.open(FILE)
    assert reader.read_at(0, 10) == b"{}"
    reader.close()
    assert os.listdir(tmp_path) == [FILE]
