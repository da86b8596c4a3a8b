"""Requests go rather to workers that have their adapter, as far as loads allow."""

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.request import ADAPTER_DIGEST_BYTES, LoraAdapter
from alignedserve.messages.cluster_view import AdapterLoad, AdapterLoads
from alignedserve.messages.gateways import ResumeRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import AttemptFailed, DecodedRequest, PrefillCompleted, PrefillRequest, WorkerLoad
from router.prefix_index import AdapterIndex
from router.state import WorkerRecord
from tests.harnesses.router import RouterHarness
from tests.support.samples import GATEWAY, R1, epoch, request, worker

FIRST, SECOND = "decode-0", "decode-1"  # of equal workers the first by name is taken


def adapter(number: int) -> LoraAdapter:
    return LoraAdapter(f"adapter-{number}", f"/adapters/{number}", bytes([number]) * ADAPTER_DIGEST_BYTES)


def two_workers(max_adapters: int = 2, max_running_requests: int = 64) -> RouterHarness:
    made = RouterHarness()
    limits = {"max_running_requests": max_running_requests, "max_adapters": max_adapters, "num_blocks": 10_000}
    for name in (FIRST, SECOND):
        made.hear(name, worker(can_prefill=True, **limits))
    return made


class Sender:
    """Sends requests one after another, each of whose prompts is computed at once."""

    def __init__(self, made: RouterHarness) -> None:
        self.made = made
        self.number = 0

    def send(self, number: int | None, prompt_len: int = 4, *, is_computed: bool = True) -> str:
        """Return the worker that gets a request of this adapter; None: of the model."""
        self.number += 1
        of = request(f"r{self.number}", prompt_len, max_tokens=1, adapter=None if number is None else adapter(number))
        (sent,) = (one for one in self.made.submit(of) if isinstance(one.message, PrefillRequest))
        if is_computed:
            completed: Message = PrefillCompleted(of.request_id, epoch(self.number), prompt_len)
            self.made.hear(sent.peer, completed)
        return sent.peer


def test_a_request_goes_where_its_adapter_is() -> None:
    sender = Sender(two_workers())
    places = [sender.send(number) for number in (1, 2, 1, 1, 2, 2, 1)]
    assert places == [FIRST, SECOND, FIRST, FIRST, SECOND, SECOND, FIRST]


def test_the_status_tells_which_adapters_run_and_which_wait() -> None:
    made = two_workers(max_adapters=7)
    sender = Sender(made)
    for number in (1, 2, 1, None):
        sender.send(number)
    assert made.status().adapters == AdapterLoads(7, (AdapterLoad("adapter-1", 2), AdapterLoad("adapter-2", 1)))
    made.lose(FIRST)
    made.lose(SECOND)
    made.submit(request("late", adapter=adapter(3)))
    made.hear(FIRST, worker(can_decode=False, max_adapters=5))
    assert made.status().adapters.max_adapters == 5
    assert {load.name for load in made.status().adapters.loads if load.num_waiting} >= {"adapter-1", "adapter-2"}


def test_requests_of_the_model_follow_none() -> None:
    sender = Sender(two_workers())
    assert [sender.send(number) for number in (1, None, None, 1)] == [FIRST, SECOND, FIRST, FIRST]


def test_an_adapter_in_demand_comes_to_be_on_both() -> None:
    """At 5 000 tokens/s a prompt goes elsewhere when it would wait for more than 0.2 s."""
    sender = Sender(two_workers())
    for name in (FIRST, SECOND):
        sender.made.hear(name, WorkerLoad(prompt_tokens_per_s=5000))
    places = [sender.send(1, 600, is_computed=False) for _ in range(4)]
    assert places == [FIRST, FIRST, SECOND, SECOND], "0, 600 and 1 200 tokens wait at the first, then fewer here"


def test_the_adapters_used_least_recently_leave() -> None:
    sender = Sender(two_workers(max_adapters=1))
    placement = sender.made.logic._placement
    assert sender.send(1) == FIRST
    assert sender.send(2) == SECOND
    assert sender.send(3) == FIRST
    assert not placement.adapters.has(FIRST, adapter(1).digest)
    assert sender.send(1) == SECOND, "on none: the least loaded"


def test_a_worker_that_is_lost_or_restarted_has_none() -> None:
    sender = Sender(two_workers())
    assert sender.send(1) == FIRST
    sender.made.lose(FIRST)
    assert sender.send(1) == SECOND
    sender.made.link(FIRST, Role.DECODE_WORKER)
    sender.made.hear(FIRST, worker(can_prefill=True, max_running_requests=64, max_adapters=2))
    assert sender.send(1) == SECOND


def test_a_worker_with_the_adapter_and_no_place_is_passed_over() -> None:
    sender = Sender(two_workers(max_running_requests=3))
    assert [sender.send(1) for _ in range(4)] == [FIRST, FIRST, FIRST, SECOND]


def test_a_worker_on_which_a_request_failed_attracts_no_more() -> None:
    sender = Sender(two_workers())
    assert [sender.send(1), sender.send(1)] == [FIRST, FIRST]
    failed = AttemptFailed(RequestId("r2"), epoch(2), FailureKind.INTERNAL, "its adapter cannot be loaded")
    sender.made.hear(FIRST, failed)
    assert sender.send(1) == SECOND, "on none: the least loaded"
    assert sender.send(1) == SECOND


def test_a_new_router_learns_of_adapters_from_what_workers_decode() -> None:
    made = RouterHarness()
    for name in (FIRST, SECOND):
        decoding = (DecodedRequest(R1, epoch(7), 0),) if name == SECOND else ()
        made.hear(name, worker(can_prefill=True, max_adapters=2, latest_attempt=epoch(7), decoding=decoding))
    made.hear(GATEWAY, ResumeRequest(request(adapter=adapter(1)), (8,), epoch(7), holder=SECOND))
    adapters = made.logic._placement.adapters
    assert list(adapters.holders(adapter(1).digest)) == [SECOND]


def test_workers_that_take_no_adapters_have_none() -> None:
    index = AdapterIndex()
    index.use(WorkerRecord("w", worker(max_adapters=0)), b"a")
    assert not index.has("w", b"a")
    index.forget("w")
