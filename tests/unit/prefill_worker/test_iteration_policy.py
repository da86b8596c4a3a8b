"""A prefill worker whose iterations a policy decides: twelve blocks of four tokens, three jobs at a time."""

from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength
from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.worker_core.part import WorkerCommand
from alignedserve.worker_core.request import CacheStage
from prefill_worker.candidate_buffers import PlaceOrder
from prefill_worker.state import PrefillJob
from tests.harnesses.prefill import EOS, PrefillHarness, added, run, token
from tests.harnesses.scheduling import EasyCosts, Script, Step
from tests.support.samples import R1, R2, request

FOUR, SEVEN = request(), request("r2", prompt_len=7)


class Paced:
    """A worker that does as its script says, and the script."""

    def __init__(self, *steps: Step) -> None:
        self.script = Script()
        self.worker = PrefillHarness(
            scheduler=PolicyIterationScheduler(Scheduler(self.script, EasyCosts(), IterationLimits(3, 10)))
        )
        self.script.steps.extend(steps)

    def seen(self) -> list[tuple[RequestId, int]]:
        """Return the tokens that each request has left, as the policy saw them last."""
        assert self.script.view is not None, "it was never asked"
        table = self.script.view.table
        return [(name, int(table.num_remaining[table.row(name)])) for name in table.request_ids]


def runs(commands: list[WorkerCommand]) -> list[RunIteration]:
    return [one for one in commands if isinstance(one, RunIteration)]


def test_a_later_prompt_goes_first_where_the_policy_says_so() -> None:
    paced = Paced(Step(r1=2), Step(r2=7), Step(r1=2))
    assert runs(paced.worker.begin(FOUR)) == [run(added(FOUR, 0), slices={"r1": 2})]
    paced.worker.begin(SEVEN)
    assert runs(paced.worker.sampled()) == [run(added(SEVEN, 1, 2), slices={"r2": 7})]
    assert runs(paced.worker.sampled(token(7, "r2"))) == [run(slices={"r1": 2}, removals=("r2",))]


def test_real_time_jobs_have_places_before_best_effort_ones_that_came_earlier() -> None:
    paced = Paced(Step(r1=3), Step(r1=1), Step(r5=4))
    for of in (FOUR, SEVEN, request("r3")):
        paced.worker.begin(of)
    paced.worker.begin(request("r4", request_class=RequestClass.BEST_EFFORT))  # neither of these has a place
    paced.worker.begin(request("r5"))
    paced.worker.sampled()
    paced.worker.sampled(token(EOS))
    assert sorted(paced.seen()) == [(R2, 7), ("r3", 4), ("r5", 4)]


def test_whose_prompt_is_computed_is_nothing_to_the_policy_any_more() -> None:
    paced = Paced(Step(r1=4))
    paced.worker.begin(FOUR)
    paced.worker.sampled(token(7))
    assert paced.seen() == []


def test_who_is_aborted_beside_an_iteration_is_counted_in_it_and_then_gone() -> None:
    paced = Paced()
    paced.worker.begin(FOUR)
    paced.script.steps.append(Step(r2=3))
    paced.worker.begin(SEVEN)
    paced.worker.hear(AbortRequest(R1))
    paced.worker.sampled()
    assert paced.seen() == [(R2, 4)]


def test_a_late_prediction_reaches_the_policy() -> None:
    paced = Paced()
    paced.worker.begin(FOUR)
    paced.worker.hear(SetPredictedLength(R1, 1, 3.5))
    assert paced.script.view is not None
    assert paced.script.view.table.predicted_len.tolist() == [3.5]


def test_a_prediction_for_a_later_attempt_does_not_reach_the_policy_with_the_earlier_one() -> None:
    paced = Paced(Step(r1=3))
    paced.worker.begin(FOUR, predicted_output_len=6.5)
    paced.worker.begin(FOUR, 2)
    paced.worker.hear(SetPredictedLength(R1, 2, 3.5))
    assert paced.script.view is not None
    assert paced.script.view.table.predicted_len.tolist() == [6.5]
    paced.worker.sampled()
    assert paced.script.view.table.predicted_len.tolist() == [3.5]


TIGHT = Slo(ttft_s=1.0)


def _job(name: str, *, arrival_s: float = 0.0, **changes: Any) -> PrefillJob:
    of = request(name, prompt_len=100, arrival_s=arrival_s, **{"slo": TIGHT, **changes})
    return PrefillJob.of(PrefillRequest(of, 1, ()), 0.0)


def _names(order: PlaceOrder, jobs: list[PrefillJob], now: float) -> list[str]:
    return [job.request.request_id for job in order.of(jobs, now)]


_JOBS = [
    _job("document", request_class=RequestClass.BEST_EFFORT),
    _job("plain", slo=Slo()),
    _job("late"),
    _job("first", arrival_s=4.5),
    _job("second", arrival_s=4.9),
]


def test_chats_on_time_go_before_late_ones_and_documents_last() -> None:
    assert _names(PlaceOrder(knows_classes=True), _JOBS, 5.0) == ["first", "second", "plain", "late", "document"]


def test_where_the_policy_knows_no_classes_all_go_as_they_came() -> None:
    expected = ["document", "plain", "late", "first", "second"]
    assert _names(PlaceOrder(knows_classes=False), _JOBS, 5.0) == expected


def test_those_that_have_a_place_do_not_wait_for_one() -> None:
    placed = _job("placed")
    placed.stage = CacheStage.HERE
    assert _names(PlaceOrder(knows_classes=True), [placed, *_JOBS[:1]], 5.0) == ["document"]


def _got_places(order: PlaceOrder, waiting: list[PrefillJob], now: float) -> list[str]:
    """Return who gets a place, one after the other, while a chat on time comes for each of them."""
    got: list[str] = []
    for number in range(200):
        waiting.append(_job(f"chat{number}", arrival_s=now))
        job = order.of(waiting, now)[0]
        order.note(job, now)
        waiting.remove(job)
        got.append(job.request.request_id)
    return got


def test_an_overdue_chat_gets_a_twentieth_while_chats_on_time_keep_coming() -> None:
    waiting = [_job(f"late{number}") for number in range(20)]
    got = _got_places(PlaceOrder(knows_classes=True), waiting, 2.5)
    assert sum(name.startswith("late") for name in got) == 10
    assert got.index("late0") == 19


def test_a_document_gets_its_floor_while_chats_keep_coming() -> None:
    """It waited until no chat did, which in an overload is never, though the router's floor had let it go."""
    waiting = [_job(f"document{number}", request_class=RequestClass.BEST_EFFORT) for number in range(20)]
    got = _got_places(PlaceOrder(knows_classes=True, floor=0.05), waiting, 5.0)
    assert sum(name.startswith("document") for name in got) == 10
    assert got.index("document0") == 19


def test_documents_that_are_not_computed_yet_keep_others_from_coming_by_the_floor() -> None:
    order = PlaceOrder(knows_classes=True, floor=0.5)
    placed = [_job(f"placed{number}", request_class=RequestClass.BEST_EFFORT) for number in range(2)]
    for job in placed:
        job.stage = CacheStage.HERE
    document, chat = _job("document", request_class=RequestClass.BEST_EFFORT), _job("chat", arrival_s=4.9)
    order.of([*placed, document, chat], 5.0)
    order.note(chat, 5.0)
    assert _names(order, [*placed, document, chat], 5.0) == ["chat", "document"]
    placed[0].stage = CacheStage.LEAVING
    assert _names(order, [*placed, document, chat], 5.0) == ["document", "chat"]
    assert order.by_floor is document
