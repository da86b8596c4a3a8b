"""Usage is counted once, whatever is killed or not known to be stored."""

import contextlib
import random
from collections.abc import Mapping, Sequence

import pytest
from typing_extensions import override

from alignedserve.batches.interfaces import Page
from alignedserve.batches.stores.sqlite_records import DAMAGED
from alignedserve.core.errors import StoreUnavailable
from alignedserve.messages.state import Change, SetValue
from alignedserve.usage.ledger import OTHER, UsageLedger
from alignedserve.usage.records import (
    BATCH,
    DAY_S,
    HOUR_S,
    REAL_TIME,
    UsageCounts,
    UsageRow,
    UsageSubject,
    grouped,
    hour_of,
    row_id,
)
from alignedserve.usage.store import UsageStore
from tests.support.memory_records import MemoryRecords

CHAT = UsageSubject("alice", "tiny", REAL_TIME)
ONE = UsageCounts(1, 10, 4, 5)


class UnsureRecords(MemoryRecords):
    """A store that often does not say whether it carried out a commit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.is_sure = False

    @override
    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        chance = 1.0 if self.is_sure else self._random.random()
        if chance < 0.3:
            raise StoreUnavailable("not carried out")
        done = await super().commit(changes, unchanged=unchanged)
        if chance < 0.6:
            raise StoreUnavailable("carried out, but nobody knows")
        return done


class CountingRecords(MemoryRecords):
    """A store that counts the values that are read and the names that are listed."""

    num_read = 0

    @override
    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        self.num_read += len(keys)
        return await super().read(keys)

    @override
    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        page = await super().page(index, after=after, limit=limit, newest_first=newest_first)
        self.num_read += 0 if page is None else len(page.members)
        return page


async def stored(records: MemoryRecords) -> UsageCounts:
    rows = await UsageStore(records).rows(0, 1 << 40)
    found = grouped(rows, bucket_s=1 << 40, by=())
    return found[0].counts if found else UsageCounts()


@pytest.mark.parametrize("seed", range(20))
async def test_two_gateways_and_a_store_that_fails_count_every_answer_once(seed: int) -> None:
    records, chance = UnsureRecords(seed), random.Random(seed)
    gateways = [UsageLedger(), UsageLedger()]
    for gateway in gateways:
        gateway.is_kept = True
    answered = UsageCounts()
    for _ in range(60):
        gateway = chance.choice(gateways)
        if chance.random() < 0.6:
            gateway.add(CHAT._replace(key=chance.choice("abc")), ONE)
            answered = answered.plus(ONE)
        else:
            with contextlib.suppress(StoreUnavailable):
                await gateway.write(UsageStore(records))
    records.is_sure = True
    for gateway in gateways:
        await gateway.write(UsageStore(records))
    assert await stored(records) == answered


async def test_a_gateway_that_is_killed_loses_what_it_had_not_written() -> None:
    records, killed, next_one = MemoryRecords(), UsageLedger(), UsageLedger()
    killed.is_kept = next_one.is_kept = True
    killed.add(CHAT, ONE)
    await killed.write(UsageStore(records))
    killed.add(CHAT, ONE)  # and now it dies
    next_one.add(CHAT, ONE)
    await next_one.write(UsageStore(records))
    assert await stored(records) == ONE.plus(ONE)


@pytest.mark.parametrize("seed", range(10))
async def test_a_batch_is_counted_once_across_drivers(seed: int) -> None:
    records, chance = UnsureRecords(seed), random.Random(seed)
    batch, totals = CHAT._replace(request_class=BATCH), UsageCounts()
    for _ in range(40):  # each time by a driver that knows the log alone
        totals = totals if chance.random() < 0.5 else totals.plus(ONE)
        with contextlib.suppress(StoreUnavailable):
            await UsageStore(records).count_batch("batch_1", batch, totals, now=chance.uniform(0.0, 1e6))
    records.is_sure = True
    await UsageStore(records).count_batch("batch_1", batch, totals, now=1e6)
    assert await stored(records) == totals


async def test_a_damaged_row_begins_anew_and_holds_up_no_others() -> None:
    records, gateway = MemoryRecords(), UsageLedger()
    gateway.is_kept = True

    async def count_one_of_each() -> None:
        for key in ("alice", "bob"):
            gateway.add(CHAT._replace(key=key), ONE)
        await gateway.write(UsageStore(records))

    await count_one_of_each()
    (row_of_alice,) = (key for key in records.keys_of("usage/") if key.endswith(row_id(CHAT)))
    await records.commit([SetValue(row_of_alice, DAMAGED)], unchanged={})
    await count_one_of_each()
    assert await stored(records) == ONE.plus(ONE).plus(ONE)


async def test_a_batch_whose_source_is_damaged_counts_nothing_twice() -> None:
    records, batch, two = MemoryRecords(), CHAT._replace(request_class=BATCH), ONE.plus(ONE)
    store = UsageStore(records)
    await store.count_batch("batch_1", batch, ONE, now=1.0)
    await records.commit([SetValue("usage-of/batch_1", DAMAGED)], unchanged={})
    await store.count_batch("batch_1", batch, ONE, now=2.0)
    assert await stored(records) == ONE
    await store.count_batch("batch_1", batch, two, now=3.0)
    assert await stored(records) == two


async def test_what_one_key_asks_reads_no_rows_of_all_others() -> None:
    records = CountingRecords()
    for hour in range(0, 48 * HOUR_S, HOUR_S):
        deltas = {(hour, CHAT._replace(key=f"key-{number}")): ONE for number in range(100)}
        deltas |= {(hour, CHAT): ONE, (hour, CHAT._replace(request_class=BATCH)): ONE}
        await UsageStore(records).add(f"gateway-{hour}", 1, deltas)
    records.num_read = 0
    rows = await UsageStore(records).rows_of_key("alice", DAY_S, DAY_S + 12 * HOUR_S)
    assert sorted(rows) == list(range(DAY_S, DAY_S + 12 * HOUR_S, HOUR_S))
    assert {(row.key, row.request_class) for of_hour in rows.values() for row in of_hour} == {
        ("alice", REAL_TIME),
        ("alice", BATCH),
    }
    assert sum(map(len, rows.values())) == 24
    assert records.num_read < 200  # of 4 900 rows


async def test_a_key_of_many_rows_has_each_once_and_those_of_its_hours_alone() -> None:
    records, models = MemoryRecords(), [f"model-{number}" for number in range(900)]
    for hour in range(0, 5 * HOUR_S, HOUR_S):
        deltas = {(hour, CHAT._replace(model=model)): ONE for model in models}
        await UsageStore(records).add(f"gateway-{hour}", 1, deltas)
    rows = await UsageStore(records).rows_of_key("alice", HOUR_S, 4 * HOUR_S)
    assert {hour: sorted(row.model for row in of_hour) for hour, of_hour in rows.items()} == {
        hour: sorted(models) for hour in (HOUR_S, 2 * HOUR_S, 3 * HOUR_S)
    }


def test_buckets_and_groups_add_up() -> None:
    rows = {
        0: [UsageRow("a", "m", REAL_TIME, ONE), UsageRow("b", "m", BATCH, ONE)],
        HOUR_S: [UsageRow("a", "n", REAL_TIME, ONE)],
        DAY_S: [UsageRow("a", "m", REAL_TIME, ONE)],
    }
    by_key = grouped(rows, bucket_s=DAY_S, by=("key",))
    assert [(one.start_s, one.group[0], one.counts.requests) for one in by_key] == [
        (0, "a", 2),
        (0, "b", 1),
        (DAY_S, "a", 1),
    ]
    assert [one.counts.requests for one in grouped(rows, bucket_s=HOUR_S, by=(), key="a")] == [1, 1, 1]
    assert hour_of(7199.9) == HOUR_S
    assert "alice" not in row_id(CHAT)


def test_metrics_have_a_bounded_number_of_names() -> None:
    ledger = UsageLedger()
    for number in range(1000):
        ledger.add(CHAT._replace(key=f"key-{number}"), ONE)
    assert len(ledger.totals) == 51
    assert ledger.totals[CHAT._replace(key=OTHER)].requests == 950
