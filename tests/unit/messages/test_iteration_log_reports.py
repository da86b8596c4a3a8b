"""The way of an iteration log's sums: from the decode worker to the router, added up there, to every gateway."""

from collections.abc import Sequence

from alignedserve.core.request import SampledToken
from alignedserve.costmodel.model import ShownSpeed
from alignedserve.messages.caches import BatchGranted, Handoff
from alignedserve.messages.cluster_view import BatchShape, IterationLogTotals, WorkerSpeed
from alignedserve.messages.events import PeerConnected, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded, IterationCompleted, IterationTimes
from alignedserve.messages.workers import IterationLogReport
from alignedserve.worker_core.part import WorkerCommand
from alignedserve.worker_core.router_link import RouterLink
from decode_worker.batching.batch_order import DecodeLimits
from decode_worker.logic import DecodeLogic
from tests.harnesses import router
from tests.harnesses.decode import BATCH, EOS, H1, loads, to_router
from tests.support.costs import decodes, prefill
from tests.support.marks import each
from tests.support.samples import DECODE, POOL, R1, ROUTER, TOTALS, handoff, request, worker


def reports(commands: Sequence[WorkerCommand]) -> list[IterationLogReport]:
    return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, IterationLogReport)]


def linked() -> DecodeLogic:
    logic = DecodeLogic(registered=worker(), limits=DecodeLimits(4), eos_token_ids=frozenset({EOS}))
    logic.on_event(PeerConnected(Role.ROUTER, ROUTER), 0.0)
    logic.on_event(Ticked(), 0.0)
    return logic


def take(logic: DecodeLogic, of: Handoff, now: float) -> None:
    """Grant it and copy it in, in no time."""
    for command in loads(logic.on_event(Received(POOL, BatchGranted(BATCH, (of,))), now)):
        logic.on_event(BlocksLoaded(POOL, command.loads, frozenset()), now)


def completed(started: float) -> IterationCompleted:
    """Return the end of an iteration that gives r1 a token and takes a second."""
    return IterationCompleted(
        (SampledToken(R1, 8),), times=IterationTimes(started + 0.25, started + 1.0, 0.125, 0.5, 0.125)
    )


# --- the decode worker


def test_an_idle_worker_says_nothing() -> None:
    logic = linked()
    assert [logic.on_event(Ticked(), now) for now in (1.0, 2.0, 3.0)] == [[], [], []]


def test_a_busy_worker_reports_once_a_second_what_is_new() -> None:
    logic = linked()
    take(logic, handoff(request(arrival_s=1.0), 11), 4.0)
    logic.on_event(completed(4.0), 5.0)  # the next starts at once
    gained = IterationLogTotals(
        num_iterations=1,
        num_requests=1,
        wall_s=5.0,
        nothing_to_do_s=1.0,
        waiting_for_prefill_s=3.0,
        turnaround_s=0.25,
        prepare_s=0.125,
        forward_s=0.5,
        sampling_s=0.125,
        sum_of_spreads=1.0,
        spread_counts=(1, *(0,) * 16),
    )
    assert logic.on_event(Ticked(), 5.0) == [to_router(IterationLogReport(gained, 1, BatchShape(1, 5, 5.0, 5)))]
    assert reports(logic.on_event(Ticked(), 5.75)) == []
    logic.on_event(completed(5.0), 5.875)
    assert reports(logic.on_event(Ticked(), 5.9375)) == []
    assert [one.gained.wall_s for one in reports(logic.on_event(Ticked(), 6.0))] == [0.875]


def test_a_worker_tells_what_it_has_shown_to_be_faster_at() -> None:
    logic, shown = linked(), ShownSpeed()
    take(logic, handoff(request(arrival_s=1.0), 11), 4.0)
    link = RouterLink(worker(speed=WorkerSpeed(0.1, 80.4, 0.2, 0.0)))
    link.connected(ROUTER)
    for now, prompt_s, expected in ((5.0, 90.0, WorkerSpeed()), (7.0, 0.25, WorkerSpeed(0.1, 0.25, 0.2, 0.0))):
        logic.on_event(completed(now - 1.0), now)
        shown.note(prefill(1024), prompt_s, now)
        shown.note(decodes(4, 64), 0.01, now)  # of which nothing was measured at the start
        (sent,) = link.totals(logic.iteration_log, now, shown)
        assert isinstance(sent.message, IterationLogReport)
        assert sent.message.speed == expected


def test_what_was_gained_without_a_router_is_kept_for_it() -> None:
    logic = DecodeLogic(registered=worker(), limits=DecodeLimits(4), eos_token_ids=frozenset({EOS}))
    take(logic, H1, 0.0)
    logic.on_event(completed(0.0), 1.0)
    assert logic.on_event(Ticked(), 1.0) == []
    logic.on_event(PeerConnected(Role.ROUTER, ROUTER), 1.0)
    assert [one.gained.num_iterations for one in reports(logic.on_event(Ticked(), 1.0))] == [1]


# --- the router


def test_the_router_adds_up_all_workers() -> None:
    connected = router.connected_router()
    connected.hear("decode-1", worker())
    for name in (DECODE, "decode-1", DECODE):
        assert connected.hear(name, IterationLogReport(TOTALS)) == []
    assert connected.status().iteration_log == TOTALS.plus(TOTALS).plus(TOTALS)


@each("is_lost_first", [True, False])
def test_a_restarted_worker_takes_nothing_away(is_lost_first: bool) -> None:
    connected = router.connected_router()
    connected.hear(DECODE, IterationLogReport(TOTALS))
    if is_lost_first:
        connected.lose(DECODE)
        assert connected.status().iteration_log == TOTALS
    connected.hear(DECODE, worker())
    assert connected.status().iteration_log == TOTALS
    connected.hear(DECODE, IterationLogReport(TOTALS))
    assert connected.status().iteration_log == TOTALS.plus(TOTALS)
