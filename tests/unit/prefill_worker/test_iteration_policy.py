"""A prefill worker whose iterations a policy decides: twelve blocks of four tokens, three jobs at a time."""

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.workers import SetPredictedLength
from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler import Scheduler
from prefill_worker.logic import PrefillCommand
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


def runs(commands: list[PrefillCommand]) -> list[RunIteration]:
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
