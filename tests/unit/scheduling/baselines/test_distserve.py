"""Placement of a finished prompt when nothing waits in a pool: the example of docs/policies/distserve.md."""

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policies import policy_entry
from router.policies.bypass import DirectHandoff
from router.state import WorkerRecord
from tests.support.samples import request, worker


def test_the_example_of_its_page() -> None:
    workers = [WorkerRecord(f"decode-{number}", worker(max_running_requests=2)) for number in range(2)]
    workers[0].decoding.add(RequestId("before"))
    went_to = []
    for name in "ABCD":
        of = request(name)
        target = DirectHandoff().target(of, of.prompt_len, workers)
        went_to.append(target.name if target is not None else "pool")
        if target is not None:
            target.decoding.add(of.request_id)
    assert went_to == ["decode-1", "decode-0", "decode-1", "pool"]


def test_a_worker_that_prefills_is_no_target() -> None:
    colocated = WorkerRecord("decode-0", worker(can_prefill=True))
    assert DirectHandoff().target(request(), 4, [colocated]) is None


def test_it_goes_past_the_pool_and_batches_are_of_any_length() -> None:
    entry = policy_entry("distserve")
    assert (entry.is_direct, entry.batching, entry.prefill_order) == (True, "fcfs", "fcfs")
