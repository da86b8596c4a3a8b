"""A router that is new takes over what workers decode meanwhile; what nobody wants any more is released."""

from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest, ClusterStatus, RequestInterrupted, ResumeRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.workers import DecodedRequest, PrefillRequest, RequestFinished, WorkerRegistered
from tests.harnesses.router import RouterHarness, aborted
from tests.support.samples import DECODE, GATEWAY, R1, epoch, request, worker

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
    made = new_router(decoded(num_received=3))
    commands = resume(made, 8, 9)
    assert commands[0] == aborted(DECODE, 7)
    assert dispatched(commands) == [DECODE]


def test_what_no_gateway_resumes_is_released_after_a_while() -> None:
    made = new_router(decoded())
    made.now = 4.9
    assert made.tick() == []
    made.now = 5.1
    assert aborted(DECODE, 7) in made.tick()


def test_what_the_client_gave_up_is_released_at_once() -> None:
    made = new_router(decoded())
    assert made.hear(GATEWAY, AbortRequest(R1)) == [aborted(DECODE, 7)]


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
