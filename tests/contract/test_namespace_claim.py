"""Two clusters in one Redis: one whose folder is another is refused while the first runs under the same namespace."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from alignedserve.batches.stores import namespace_claim, redis_records
from alignedserve.batches.stores.namespace_claim import claim_on, folder_id
from alignedserve.batches.stores.redis_records import RedisRecords
from alignedserve.cluster.batch_storage import open_batch_storage
from alignedserve.config.environment import REDIS_URL_VARIABLE
from alignedserve.config.sections import BatchesConfig, ClusterConfig
from alignedserve.core.errors import ResourceError
from alignedserve.disk.durable import write_durably
from alignedserve.messages.state import SetValue
from tests.support.memory_records import MemoryRecords
from tests.support.servers.valkey import ValkeyServer

pytestmark = pytest.mark.slow


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValkeyServer]:
    monkeypatch.setattr(namespace_claim, "_CLAIM_S", 0.02)
    monkeypatch.setattr(redis_records, "_LOOK_S", 0.05)
    (tmp_path / "redis").mkdir()
    server = ValkeyServer(tmp_path / "redis")
    server.start()
    monkeypatch.setenv(REDIS_URL_VARIABLE, server.location.url)
    yield server
    server.kill()


@asynccontextmanager
async def running(redis: ValkeyServer, folder: Path) -> AsyncIterator[None]:
    """The claims of a cluster's driver of batches, while it runs."""
    await asyncio.to_thread(folder.mkdir, mode=0o700)
    records = RedisRecords(redis.location, namespace="alignedserve")
    claiming = asyncio.create_task(claim_on(records, folder_id(folder), "alignedserve"))
    while (await records.read([namespace_claim.CLAIM]))[0] is None:  # noqa: ASYNC110  (of a server)
        await asyncio.sleep(0.01)
    yield
    claiming.cancel()
    await records.close()


async def start(folder: Path, namespace: str = "alignedserve") -> None:
    """Open the storage of a cluster that starts."""
    batches = BatchesConfig(folder=str(folder), namespace=namespace)
    await asyncio.to_thread(open_batch_storage, ClusterConfig(batches=batches))


async def test_a_second_cluster_with_a_folder_of_its_own_is_refused(redis: ValkeyServer, tmp_path: Path) -> None:
    async with running(redis, tmp_path / "one"):
        with pytest.raises(ResourceError, match=r"batches\.namespace=alignedserve .* set batches\.namespace to"):
            await start(tmp_path / "two")
        await start(tmp_path / "one")
        await start(tmp_path / "two", namespace="two")


async def test_a_cluster_that_has_ended_stands_in_nobodys_way(
    redis: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_records, "WATCH_S", 0.2)
    async with running(redis, tmp_path / "one"):
        pass
    await start(tmp_path / "two")


async def test_a_redis_that_does_not_answer_is_waited_for(redis: ValkeyServer, tmp_path: Path) -> None:
    redis.kill()
    began_s = time.monotonic()
    await start(tmp_path / "one")
    assert time.monotonic() - began_s < namespace_claim.WATCH_S


async def test_two_that_started_together_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(namespace_claim, "_CLAIM_S", 0.0)
    records = MemoryRecords()
    claims = [asyncio.create_task(claim_on(records, folder, "shared")) for folder in ("one", "two")]
    for _ in range(20):
        await asyncio.sleep(0)
    for claim in claims:
        claim.cancel()
    assert 1 <= caplog.text.count("a cluster with another folder uses batches.namespace=shared too") <= 2


async def test_records_of_a_newer_version_are_refused_by_name_and_left_as_they_are(
    redis: ValkeyServer, tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    folder.mkdir(mode=0o700)
    records = RedisRecords(redis.location, namespace="alignedserve")
    assert await records.commit([SetValue("version", b"9")], unchanged={})
    with pytest.raises(
        ResourceError, match=r"batches\.namespace=alignedserve .* newer version .*\(format 9; .* knows 1"
    ):
        await start(folder)
    assert await records.read(["version"]) == [b"9"]
    await start(folder, namespace="two")
    await start(folder, namespace="two")
    two = RedisRecords(redis.location, namespace="two")
    assert await two.read(["version"]) == [b"1"]
    await records.close()
    await two.close()


def test_clusters_that_start_at_once_in_one_folder_make_the_same_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    write = write_durably

    def write_late(path: Path, content: bytes) -> None:
        if not others:
            others.append("")
            others.append(folder_id(tmp_path))
        write(path, content)

    monkeypatch.setattr(namespace_claim, "write_durably", write_late)
    assert folder_id(tmp_path) == others[1]
    assert [path.name for path in tmp_path.iterdir()] == ["folder.id"]
