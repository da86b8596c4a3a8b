"""Stores of contents all keep the same promises: a folder, the head seen from elsewhere, a bucket on a real server."""

import asyncio
import datetime
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.batches.interfaces import BlobStore, ContentStore
from alignedserve.batches.records import FileId
from alignedserve.batches.remote.remote_stores import RemoteBlobs
from alignedserve.batches.stores import object_blobs
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.batches.stores.object_blobs import ObjectBlobs
from alignedserve.batches.stores.object_location import ObjectStoreLocation
from alignedserve.core.errors import StorageDamaged, StorageError, StoreUnavailable
from tests.support.servers.s3_server import S3Server, s3_server
from tests.support.servers.state_links import state_hosts

FILE = FileId("file-" + "a" * 24)
OTHER = FileId("file-" + "b" * 24)
CONTENT = os.urandom(700_000)


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["folder", "head", pytest.param("bucket", marks=pytest.mark.slow)])
async def contents(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ContentStore]:
    if request.param == "folder":
        yield DiskBlobs(tmp_path)
    elif request.param == "head":
        async with state_hosts(tmp_path) as hosts:
            yield RemoteBlobs(hosts.client())
    else:
        location: ObjectStoreLocation = request.getfixturevalue("bucket").location
        yield ObjectBlobs(replace(location, url=f"s3://files-of-tests/{tmp_path.name}"))


async def put(store: ContentStore, file_id: FileId, content: bytes) -> None:
    writer = await store.begin(file_id)
    try:
        for start in range(0, len(content), 100_000):
            await writer.write(content[start : start + 100_000])
        await writer.commit()
    finally:
        await writer.discard()


async def read(store: ContentStore, file_id: FileId, start: int = 0) -> bytes:
    return b"".join([chunk async for chunk in store.chunks(file_id, start)])


async def test_a_content_is_read_from_any_byte_on(contents: ContentStore) -> None:
    await put(contents, FILE, CONTENT)
    for start in (0, 1, 262_144, len(CONTENT) - 1, len(CONTENT)):
        assert await read(contents, FILE, start) == CONTENT[start:]


async def test_nothing_is_there_before_it_is_whole(contents: ContentStore) -> None:
    writer = await contents.begin(FILE)
    await writer.write(CONTENT)
    with pytest.raises(StorageDamaged):
        await read(contents, FILE)
    await writer.discard()
    await writer.discard()
    with pytest.raises(StorageDamaged):
        await read(contents, FILE)


async def test_removal_may_be_repeated(contents: ContentStore) -> None:
    await put(contents, FILE, CONTENT)
    await put(contents, OTHER, b"1")
    await contents.remove(FILE)
    await contents.remove(FILE)
    with pytest.raises(StorageDamaged):
        await read(contents, FILE)
    assert await read(contents, OTHER) == b"1"


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return DiskBlobs(tmp_path)
    location: ObjectStoreLocation = request.getfixturevalue("bucket").location
    return ObjectBlobs(replace(location, url=f"s3://files-of-tests/{tmp_path.name}"))


async def test_the_driver_reads_anywhere_and_finds_what_is_old(blobs: BlobStore) -> None:
    await put(blobs, FILE, CONTENT)
    await put(blobs, OTHER, b"1")
    reader = await blobs.open(FILE)
    assert reader.read_at(500_000, 1000) == CONTENT[500_000:501_000]
    reader.close()
    with pytest.raises(StorageDamaged):
        await blobs.open(FileId("file-" + "c" * 24))
    assert await blobs.committed_before(-5.0) == [FILE, OTHER]
    assert await blobs.committed_before(60.0) == []
    assert await blobs.remove_abandoned(0.0) == 0


# --- a bucket that is away


@pytest.mark.slow
async def test_a_server_that_is_killed_in_the_middle_of_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_blobs, "_MAX_RETRIES", 1)
    with s3_server() as server:
        store = ObjectBlobs(server.location)
        writer = await store.begin(FILE)
        await writer.write(os.urandom(12 << 20))
        server.suspend()
        committing = asyncio.create_task(writer.commit())
        await asyncio.sleep(0.3)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await committing
        with pytest.raises(StoreUnavailable):
            await read(store, FILE)
        server.start()
        with pytest.raises(StorageDamaged):
            await read(store, FILE)
        await writer.commit()  # the client's content is still here: a gateway would have answered 503
        await writer.discard()
        assert len(await read(store, FILE)) == 12 << 20


@pytest.mark.slow
async def test_a_server_that_is_slow_is_waited_for(bucket: S3Server) -> None:
    store = ObjectBlobs(bucket.location)
    bucket.suspend()
    began_s = time.monotonic()
    threading.Timer(1.0, bucket.go_on).start()
    await put(store, FILE, CONTENT)
    assert time.monotonic() - began_s > 0.9
    assert await read(store, FILE) == CONTENT


@pytest.mark.slow
async def test_a_server_that_never_answers_is_given_up(bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_blobs, "_MAX_RETRIES", 0)
    monkeypatch.setattr(object_blobs, "_TIMEOUT", datetime.timedelta(seconds=0.5))
    store = ObjectBlobs(bucket.location)
    bucket.suspend()
    try:
        with pytest.raises(StoreUnavailable):
            await put(store, FILE, CONTENT)
    finally:
        bucket.go_on()


@pytest.mark.slow
async def test_a_client_that_is_slow_gets_all(bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(9 << 20)
    await put(ObjectBlobs(bucket.location), FILE, content)
    monkeypatch.setattr(object_blobs, "_TIMEOUT", datetime.timedelta(seconds=2.0))
    parts = []
    async for part in ObjectBlobs(bucket.location).chunks(FILE):
        parts.append(part)
        await asyncio.sleep(1.2)
    assert b"".join(parts) == content


@pytest.mark.slow
async def test_a_bucket_that_is_not_there_is_refused(bucket: S3Server) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        ObjectBlobs(replace(bucket.location, url="s3://another-bucket/x")).check()
    ObjectBlobs(bucket.location).check()


@pytest.mark.slow
async def test_wrong_credentials_are_named() -> None:
    with s3_server(is_closed=True) as server:
        store = ObjectBlobs(server.location)
        with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
            store.check()
        with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
            await put(store, FILE, CONTENT)
        with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
            await read(store, FILE)
