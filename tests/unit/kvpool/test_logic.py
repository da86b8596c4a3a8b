"""The KV pool, decision by decision: eight blocks of four tokens, leases of ten seconds."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import LeaseId
from alignedserve.messages.caches import BlockRun, BlocksTaken, CancelReservation, ReservationRefused, ReserveBlocks
from alignedserve.messages.events import Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolLoad, PoolRegistered
from alignedserve.process.addresses import AddressBook
from alignedserve.process.process_spec import POOL, ProcessSpec
from kvpool.logic import PoolLogic
from kvpool.policies.batch_former import FcfsBatchFormer
from kvpool.service import KvPool
from tests.harnesses.pool import ARENA, FORM, L1, L2, PoolHarness, freed, grants, leased, reserved, taken, written
from tests.support.marks import each
from tests.support.samples import PREFILL, R1, R2, R3, ROUTER, request

# --- peers


def test_a_worker_is_offered_the_arena() -> None:
    assert PoolHarness().link("decode-1", Role.DECODE_WORKER) == [Send("decode-1", ARENA)]


def test_the_router_hears_of_the_pool() -> None:
    assert PoolHarness().link(ROUTER, Role.ROUTER) == [Send(ROUTER, PoolRegistered(8, "digest"))]


def test_counts_that_have_changed_are_reported_at_the_next_tick() -> None:
    made = PoolHarness()
    made.logic.on_event(Ticked(), 0.0)
    sent = made.logic.on_event(Received(PREFILL, ReserveBlocks(R1, L1, 3)), 0.0)
    assert [command.peer for command in sent if isinstance(command, Send)] == [PREFILL]
    counts = PoolLoad(num_blocks_used=3, num_pooled=0, num_reserved=0)
    assert made.logic.on_event(Ticked(), 0.0) == [Send(ROUTER, counts)]
    assert made.logic.on_event(Ticked(), 0.0) == []


# --- reservations


def test_a_reservation_gets_its_blocks_stamped_first() -> None:
    assert PoolHarness().reserve("r1", 3) == leased("r1", 1, 0, 1, 2)


def test_leases_are_numbered_from_the_first_lease_of_this_process() -> None:
    logic = PoolLogic(arena=ARENA, block_size=4, batch_former=FcfsBatchFormer(), lease_s=10.0, first_lease=100)
    assert logic.on_event(Received(PREFILL, ReserveBlocks(R1, L1, 2)), 0.0) == leased("r1", 100, 0, 1)


def test_more_than_the_pool_has_is_refused() -> None:
    assert PoolHarness().reserve("r1", 9) == [Send(PREFILL, ReservationRefused(R1, L1))]


def test_reservations_are_served_in_order_and_never_overtaken() -> None:
    made = PoolHarness()
    made.reserve("r1", 6)
    assert made.reserve("r2", 4) == []
    assert made.reserve("r3", 1) == []  # a block is free, but r2 came first
    assert made.hear(PREFILL, CancelReservation(R1, L1)) == [
        freed(0, 1, 2, 3, 4, 5),
        *leased("r2", 2, 0, 1, 2, 3),
        *leased("r3", 3, 4),
    ]


def test_one_that_leaves_the_line_lets_the_next_in() -> None:
    made = PoolHarness()
    made.reserve("r1", 6)
    made.reserve("r2", 4)
    made.reserve("r3", 1)
    assert made.hear(PREFILL, CancelReservation(R2, L1)) == leased("r3", 2, 6)


def test_a_repeated_reservation_in_the_line_is_there_once() -> None:
    made = PoolHarness()
    made.reserve("r1", 8)
    made.reserve("r2", 2)
    made.reserve("r2", 3, attempt=L2)
    assert made.hear(PREFILL, CancelReservation(R1, L1))[1:] == leased("r2", 2, 0, 1, 2, attempt=L2)


def test_a_stale_reservation_is_refused_and_the_later_one_stays() -> None:
    made = PoolHarness()
    made.reserve("r1", 3, attempt=L2, peer="prefill-1")
    assert made.reserve("r1", 3, attempt=L1) == [Send(PREFILL, ReservationRefused(R1, L1))]


def test_a_stale_reservation_is_refused_in_the_line_as_well() -> None:
    made = PoolHarness()
    made.reserve("r1", 8)
    made.reserve("r2", 3, attempt=L2)
    assert made.reserve("r2", 3, attempt=L1) == [Send(PREFILL, ReservationRefused(R2, L1))]


def test_a_reservation_that_does_not_wait_is_refused_when_no_blocks_are_free_now() -> None:
    made = PoolHarness()
    made.reserve("r1", 6)
    assert made.reserve("r2", 3, may_wait=False) == [Send(PREFILL, ReservationRefused(R2, L1))]
    assert made.reserve("r2", 2, may_wait=False) == leased("r2", 2, 6, 7)


def test_a_reservation_that_does_not_wait_overtakes_no_other() -> None:
    made = PoolHarness()
    made.reserve("r1", 6)
    made.reserve("r2", 4)
    assert made.reserve("r3", 1, may_wait=False) == [Send(PREFILL, ReservationRefused(R3, L1))]


# --- writing


@each(
    "changes",
    [
        {"lease_id": LeaseId(2)},
        {"generation": 2},
        {"generation": 0},
        {"attempt": L2},
        {"request": request("r2", prompt_len=8)},
        {"context_len": 4},
        {"context_len": 9},
        {"context_len": 0},
        {"runs": ()},
        {"runs": (BlockRun(0, 1, 99),)},
        {"runs": (BlockRun(1, 1, 99), BlockRun(0, 1, 99))},
        {"runs": (BlockRun(0, 1, 99), BlockRun(0, 1, 99))},
        {"runs": (BlockRun(0, 3, 99),)},
        {"runs": (BlockRun(0, 1, 99), BlockRun(2, 1, 99))},
        {"runs": (BlockRun(0, 2, 99), BlockRun(5, 1, 99))},
    ],
    ids=str,
)
def test_what_does_not_describe_the_lease_is_not_believed(changes: dict[str, Any]) -> None:
    made = PoolHarness()
    made.reserve("r1", 2)
    content = written("r1", reserved("r1", 1, 0, 1), **changes)
    assert made.hear(PREFILL, content) == [taken(content.request.request_id, False, content.attempt)]
    assert grants(made.hear(ROUTER, FORM)) == []


def test_one_run_may_cover_neighbours() -> None:
    made = PoolHarness()
    made.reserve("r1", 2)
    content = written("r1", reserved("r1", 1, 0, 1), runs=(BlockRun(0, 2, 99),))
    assert made.hear(PREFILL, content)[0] == taken("r1", True)


def test_an_absurd_run_is_refused_without_being_spelt_out() -> None:
    made = PoolHarness()
    made.reserve("r1", 2)
    content = written("r1", reserved("r1", 1, 0, 1), runs=(BlockRun(0, 1 << 19, 99),))
    tracemalloc.start()
    try:
        assert made.hear(PREFILL, content) == [taken("r1", False)]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_worker_that_does_not_hold_the_lease_cannot_write_it() -> None:
    made = PoolHarness()
    made.reserve("r1", 2)
    content = written("r1", reserved("r1", 1, 0, 1))
    assert made.hear("prefill-1", content) == [Send("prefill-1", BlocksTaken(R1, L1, is_accepted=False))]


class _EmptyDirectory:
    """No process has published where it is."""

    def publish(self, name: str, entry: str) -> None:
        """See Directory."""

    def look_up(self, name: str) -> str | None:
        """See Directory."""


def test_no_memory_is_left_when_the_address_of_its_node_cannot_be_listened_at(tmp_path: Path) -> None:
    # An address for documentation, which no host has.
    book = AddressBook(tmp_path, "node", "192.0.2.1", _EmptyDirectory(), has_tls=False)
    process_spec = ProcessSpec(Role.KV_POOL, POOL, "test", b"secret", 5.0, book, tmp_path)
    path = tmp_path / "pool.arena"
    with pytest.raises(OSError, match="assign"):
        KvPool(
            config=PoolConfig(memory_bytes=1 << 20),
            batching=BatchingConfig(),
            layout=BlockLayout(16, 1, 1, 4, "float16"),
            arena_path=path,
            process_spec=process_spec,
        )
    assert not path.exists()
