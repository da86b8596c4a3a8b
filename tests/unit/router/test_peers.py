"""What a new router takes over from workers, and the peers that it tells decode workers of."""

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import RequestId, WorkerName
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest, ClusterStatus, RequestInterrupted, ResumeRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import BatchFormed, FormBatch, PoolRegistered, RequestPooled
from alignedserve.messages.workers import (
    DecodedRequest,
    PeerNeeded,
    PeersChanged,
    PrefillCompleted,
    PrefillRequest,
    RegistrationRefused,
    RequestFinished,
    WorkerLoad,
    WorkerRegistered,
)
from router.placement import Placement
from tests.harnesses.router import ASKED, BATCH, DISPATCHED, POOLED, RouterHarness, aborted
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, epoch, request, worker

OTHER = "decode-1"
BEGUN = epoch(7)


def decoded(num_received: int = 0, attempt: int = BEGUN) -> DecodedRequest:
    return DecodedRequest(R1, attempt, num_received)


def registered(*decoding: DecodedRequest) -> WorkerRegistered:
    return worker(can_prefill=True, latest_attempt=BEGUN, decoding=decoding)


def new_router(*decoding: DecodedRequest, name: str = DECODE) -> RouterHarness:
    """Return a router to which a worker has come that decodes these."""
    made = RouterHarness()
    assert made.hear(name, registered(*decoding)) == []
    return made


def resume(made: RouterHarness, *generated: int, holder: str = DECODE) -> list[Send]:
    commands = made.hear(GATEWAY, ResumeRequest(request(), generated, BEGUN, holder=holder))
    return [one for one in commands if not isinstance(one.message, ClusterStatus)]


def dispatched(commands: list[Send]) -> list[str]:
    return [one.peer for one in commands if isinstance(one.message, PrefillRequest)]


def test_what_a_worker_decodes_stays_there() -> None:
    made = new_router(decoded())
    assert resume(made, 8, 9) == []
    assert made.status().num_decoding == 1
    made.hear(DECODE, RequestFinished(R1, BEGUN, 5))
    assert made.status().num_decoding == 0


def test_so_does_it_where_the_gateway_comes_first() -> None:
    made = RouterHarness()
    assert resume(made, 8) == []
    assert made.hear(OTHER, registered()) == []  # it is not waited for in vain
    assert made.hear(DECODE, registered(decoded())) == []
    assert made.status().num_decoding == 1


def test_a_request_whose_worker_comes_without_it_is_computed_again() -> None:
    made = RouterHarness()
    resume(made, 8)
    assert dispatched(made.hear(DECODE, registered())) == [DECODE]


def test_a_worker_that_does_not_come_is_not_waited_for() -> None:
    made = new_router(name=OTHER)
    assert resume(made, 8) == []
    made.now = 4.9
    assert dispatched(made.tick()) == []
    made.now = 5.1
    assert dispatched(made.tick()) == [OTHER]


def test_nor_is_one_that_its_gateway_has_lost() -> None:
    made = new_router(name=OTHER)
    resume(made, 8)
    assert dispatched(resume(made, 8, holder="")) == [OTHER]


def test_what_is_not_adopted_yet_counts_as_left_at_a_worker_that_drains() -> None:
    made = new_router(decoded())
    assert made.logic.num_left([DECODE, OTHER]) == {DECODE: 1, OTHER: 0}
    assert resume(made, 8) == []
    assert made.logic.num_left([DECODE]) == {DECODE: 1}
    awaiting = RouterHarness()
    resume(awaiting, 8)
    assert awaiting.logic.num_left([DECODE, OTHER]) == {DECODE: 1, OTHER: 0}


def test_what_was_computed_elsewhere_meanwhile_is_released() -> None:
    made = new_router(name=OTHER)
    assert dispatched(resume(made, 8, holder="")) == [OTHER]
    assert made.hear(DECODE, registered(decoded())) == [aborted(DECODE, 7)]


def test_tokens_that_the_client_lacks_are_computed_again() -> None:
    commands = resume(new_router(decoded(num_received=3)), 8, 9)
    assert commands[0] == aborted(DECODE, 7)
    assert dispatched(commands) == [DECODE]


def test_what_no_gateway_resumes_is_released_after_a_while() -> None:
    made = new_router(decoded())
    made.now = 4.9
    assert made.tick() == []
    made.now = 5.1
    assert aborted(DECODE, 7) in made.tick()


def test_what_the_client_gave_up_is_released_at_once() -> None:
    assert new_router(decoded()).hear(GATEWAY, AbortRequest(R1)) == [aborted(DECODE, 7)]


def test_what_has_ended_meanwhile_is_not_adopted() -> None:
    made = new_router(decoded())
    made.hear(DECODE, RequestFinished(R1, BEGUN, 9))
    assert dispatched(resume(made, 8)) == [DECODE]


def test_of_two_workers_the_later_attempt_counts() -> None:
    made = new_router(decoded())
    assert made.hear(OTHER, registered(decoded(attempt=epoch(7, 1)))) == [aborted(DECODE, 7)]
    assert resume(made, 8, holder=OTHER) == []
    assert made.lose(OTHER) == [Send(GATEWAY, RequestInterrupted(R1))]


def test_a_worker_whose_link_was_cut_keeps_what_it_decodes() -> None:
    made = new_router(decoded())
    resume(made, 8)
    assert made.lose(DECODE) == [Send(GATEWAY, RequestInterrupted(R1))]
    assert made.hear(DECODE, registered(decoded())) == []
    assert resume(made, 8, 9) == []  # the gateway's answer comes late
    assert made.status().num_decoding == 1


def test_a_lost_gateway_takes_its_requests_along() -> None:
    made = RouterHarness()
    resume(made, 8)
    made.lose(GATEWAY)
    made.link(GATEWAY, Role.GATEWAY)
    made.now = 9.0
    assert dispatched(made.tick()) == []
    assert aborted(DECODE, 7) not in made.hear(DECODE, registered(decoded()))
    made.now = 15.0
    assert aborted(DECODE, 7) in made.tick()


PREFILLER = worker(can_prefill=True, can_decode=False)
FAR_PREFILLER = worker(can_prefill=True, can_decode=False, pool_name="pool-1")


def names(*given: str) -> tuple[WorkerName, ...]:
    return tuple(map(WorkerName, given))


def test_a_decode_worker_is_told_the_prefill_workers_of_its_node_when_it_registers() -> None:
    router = RouterHarness()
    assert router.hear(PREFILL, PREFILLER) == []
    assert router.hear("prefill-1", FAR_PREFILLER) == []
    assert router.hear(DECODE, worker()) == [Send(DECODE, PeersChanged(names(PREFILL), is_complete=True))]


def test_a_prefill_worker_that_joins_is_announced_to_the_decode_workers_of_its_node() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    router.hear("decode-1", worker(pool_name="pool-1"))
    assert router.hear(PREFILL, PREFILLER) == [Send(DECODE, PeersChanged(names(PREFILL)))]


def test_one_that_is_lost_is_not_to_be_dialled() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    router.hear(PREFILL, PREFILLER)
    gone = PeersChanged((), left=names(PREFILL))
    assert router.lose(PREFILL) == [Send(DECODE, gone)]
    assert router.lose(PREFILL) == []


def test_a_lost_decode_worker_concerns_no_other() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    router.hear("decode-1", worker())
    assert router.lose(DECODE) == []


def test_colocated_workers_hand_nothing_over() -> None:
    router = RouterHarness()
    assert router.hear(DECODE, worker(can_prefill=True)) == []
    assert router.hear("decode-1", worker(can_prefill=True)) == []
    assert router.lose(DECODE) == []


def test_a_worker_that_is_refused_is_not_announced() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    (refused,) = router.hear(PREFILL, worker(can_prefill=True, can_decode=False, layout_digest="other"))
    assert isinstance(refused.message, RegistrationRefused)


def test_a_pool_is_named_to_the_worker_of_another_node_that_is_about_to_get_its_batch() -> None:
    router = RouterHarness()
    for pool in (POOL, "pool-1"):
        assert router.hear(pool, PoolRegistered(100)) == []
    router.hear(PREFILL, PREFILLER)
    router.hear(DECODE, worker(pool_name="pool-1"))
    router.submit(request())
    router.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    asked = [Send(DECODE, PeerNeeded(WorkerName(POOL))), Send(POOL, FormBatch(BATCH, ASKED, 20, 1, 1))]
    assert router.hear(POOL, RequestPooled(R1, POOLED, 4, 1)) == asked
    assert router.hear(POOL, BatchFormed(BATCH, ASKED, ())) == []  # there is no link yet
    again = router.hear(DECODE, WorkerLoad())  # there is
    assert [command.peer for command in again] == [DECODE, POOL]


def test_a_pool_of_its_own_node_is_not_named_to_a_worker() -> None:
    router = RouterHarness()
    router.hear(POOL, PoolRegistered(100))
    router.hear(PREFILL, PREFILLER)
    router.hear(DECODE, worker())
    router.submit(request())
    router.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    assert [command.peer for command in router.hear(POOL, RequestPooled(R1, POOLED, 4, 1))] == [POOL]


NAMES = ("decode-0", "decode-1", "decode-2")


def placement(*names: str, num_active: int = 2) -> Placement:
    made = Placement(max_candidate_requests=0, batching=BatchingConfig())
    for name in names:
        made.register(name, worker(can_prefill=True, num_active=num_active))
    return made


def resting(made: Placement) -> list[str]:
    return [name for name, worker in made.workers.items() if worker.is_draining]


def test_without_standbys_all_have_work() -> None:
    assert resting(placement(*NAMES, num_active=0)) == []


def test_the_last_one_to_come_stands_by_and_gets_nothing() -> None:
    made = placement(*NAMES)
    assert resting(made) == ["decode-2"]
    assert not made.can_prefill_now(made.workers["decode-2"])
    assert made.can_prefill_now(made.workers["decode-1"])


def test_it_takes_the_place_of_one_that_is_lost_which_stands_by_when_it_is_back() -> None:
    made = placement(*NAMES)
    made.remove("decode-0")
    assert resting(made) == []
    assert made.can_prefill_now(made.workers["decode-2"])
    made.register("decode-0", worker(can_prefill=True, num_active=2))
    assert resting(made) == ["decode-0"]


def test_it_takes_the_place_of_one_that_drains_for_as_long() -> None:
    made = placement(*NAMES)
    made.set_draining(["decode-1"])
    assert resting(made) == ["decode-1"]
    made.set_draining([])
    assert resting(made) == ["decode-2"]


def test_a_standby_that_drains_takes_no_place() -> None:
    made = placement(*NAMES)
    made.set_draining(["decode-2"])
    made.remove("decode-0")
    assert resting(made) == ["decode-2"]


def test_whoever_decodes_has_work_also_where_a_router_is_new() -> None:
    made = placement("decode-2", "decode-1")  # whichever comes first
    held = (DecodedRequest(RequestId("r"), 1, 0),)
    made.register("decode-0", worker(can_prefill=True, num_active=2, decoding=held))
    assert "decode-0" not in resting(made)
    assert len(resting(made)) == 1


def test_each_node_has_standbys_of_its_own() -> None:
    made = Placement(max_candidate_requests=0, batching=BatchingConfig())
    for name, pool in zip(NAMES, ("pool-0", "pool-0", "pool-1"), strict=True):
        made.register(name, worker(can_prefill=True, num_active=1, pool_name=pool))
    assert resting(made) == ["decode-1"]
