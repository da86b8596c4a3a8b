"""Workers that stand by: who has work as workers come, are lost and drain."""

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import RequestId
from alignedserve.messages.workers import DecodedRequest
from router.placement import Placement
from tests.support.samples import worker

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
