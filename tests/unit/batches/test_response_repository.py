"""Stored responses: kept for a time, by their owner, within a bound of bytes."""

import msgspec
import pytest

from alignedserve.batches.responses import bounded_records
from alignedserve.batches.responses.response_repository import ResponseRepository, StoredResponse
from alignedserve.batches.stores.memory_records import MemoryRecords

NO_BOUND = 1 << 40


def record(number: int, owner: str = "me", size: int = 100) -> StoredResponse:
    text = msgspec.Raw(b'"' + b"x" * size + b'"')
    return StoredResponse(
        response_id=f"resp_{number:032x}",
        owner=owner,
        created_s=float(number),
        expires_s=1000.0 + number,
        response=text,
        items=msgspec.Raw(b"[]"),
    )


async def found(repository: ResponseRepository, numbers: range, owner: str = "me") -> list[int]:
    records = await repository.find(owner, [record(number).response_id for number in numbers])
    return [number for number, one in zip(numbers, records, strict=True) if one is not None]


async def test_a_response_is_its_owners() -> None:
    repository = ResponseRepository(MemoryRecords())
    await repository.add(record(1), now=1.0, max_bytes=NO_BOUND)
    assert await repository.find("me", [record(1).response_id]) == [record(1)]
    assert await found(repository, range(1, 2), owner="you") == []


async def test_it_ends_with_its_lifetime() -> None:
    now = 0.0
    repository = ResponseRepository(MemoryRecords(clock=lambda: now))
    await repository.add(record(1), now=0.0, max_bytes=NO_BOUND)
    now = 1000.9
    assert await found(repository, range(1, 2)) == [1]
    now = 1001.1
    assert await found(repository, range(1, 2)) == []


@pytest.mark.parametrize("page", [2, 1000])
async def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(bounded_records, "_PAGE", page)
    store = MemoryRecords()
    repository = ResponseRepository(store)
    await repository.add(record(99, owner="you"), now=0.0, max_bytes=5000)
    for number in range(20):
        await repository.add(record(number, size=500), now=0.0, max_bytes=5000)
    kept = await found(repository, range(20))
    assert kept == list(range(20))[-len(kept) :]
    listed = await store.page("responses/me", after=None, limit=100, newest_first=False)
    assert listed is not None
    assert len(listed.members) == len(kept)
    assert 3 <= len(kept) <= 6
    assert await found(repository, range(99, 100), owner="you") == [99]


async def test_one_that_is_larger_than_the_bound_is_not_kept() -> None:
    repository = ResponseRepository(MemoryRecords())
    await repository.add(record(1, size=5000), now=0.0, max_bytes=1000)
    assert await found(repository, range(1, 2)) == []


async def test_what_became_of_it_takes_its_place() -> None:
    store = MemoryRecords()
    repository = ResponseRepository(store)
    await repository.add(record(1), now=0.0, max_bytes=NO_BOUND)
    await repository.replace(record(1, size=300), now=0.0)
    await repository.replace(record(1, size=300), now=0.0)
    listed = await store.page("responses/me", after=None, limit=10, newest_first=False)
    assert listed is not None
    assert len(listed.members) == 1
    await repository.remove(record(1))
    await repository.remove(record(1))
    await repository.replace(record(1), now=0.0)  # deleted ones do not come back
    assert await found(repository, range(1, 2)) == []
