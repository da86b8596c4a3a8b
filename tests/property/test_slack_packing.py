"""Random workers and candidates: no gap is planned beyond what objectives allow, and none is passed that has waited."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core.ids import BatchId
from alignedserve.core.request import Slo
from alignedserve.costmodel.work import IterationWork
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.slack_packing import PATIENCE_S, SlackPack
from tests.harnesses.scheduling import EasyCosts
from tests.support.samples import handoff, request

SHARE, LEAST_S, NOW = 0.8, 0.011, 10.0  # an iteration of one request without context
UNTIL = (1.0 + SHARE) / 2  # of an objective, with what waits


@dataclass(frozen=True)
class Drawn:
    """A request: its prompt, tokens, objective, the tokens to come, since when it has its first token, and is here."""

    prompt_len: int
    num_tokens: int
    tpot_s: float | None
    num_left: int
    began_s: float

    @property
    def context_len(self) -> int:
        return self.prompt_len + self.num_tokens

    def candidate(self, name: str) -> Candidate:
        max_tokens = self.num_tokens + max(self.num_left, self.num_tokens + 1)  # what is expected is not overrun
        of = request(name, prompt_len=self.prompt_len, max_tokens=max_tokens, slo=Slo(tpot_s=self.tpot_s))
        given = handoff(of, 1, generated=(7,) * self.num_tokens, predicted_output_len=None)
        made = Candidate.of_handoff(given, BatchId(1), self.began_s)
        made.predicted_output_len = float(self.num_tokens + self.num_left)
        return made


DRAWN = st.builds(
    Drawn,
    prompt_len=st.integers(1, 600),
    num_tokens=st.integers(1, 30),
    tpot_s=st.sampled_from([None, 0.005, 0.015, 0.03, 0.1]),
    num_left=st.integers(1, 60),
    began_s=st.floats(NOW - 2.0, NOW),
)


def allowed_s(running: list[Drawn], until: int) -> float:
    """Return how long an iteration may be that holds what all that run are owed, with one that has `until` tokens."""
    bounds = []
    for one in running:
        if one.tpot_s is not None and SHARE * one.tpot_s >= LEAST_S:
            ahead_s = max(one.began_s + (one.num_tokens - 1) * one.tpot_s - NOW, 0.0)
            bounds.append(UNTIL * one.tpot_s + ahead_s / min(one.num_left, until))
    return min(bounds, default=float("inf"))


def bound_s(running: list[Drawn], new: list[Drawn], one: Drawn) -> float:
    return min(allowed_s(running, one.num_left), allowed_s([replace(other, began_s=0.0) for other in new], 1))


def iteration_s(running: list[Drawn]) -> float:
    work = IterationWork()
    for one in running:
        work.add_decode(one.context_len)
    return EasyCosts().iteration_s(work)


@settings(max_examples=60, deadline=None)
@given(running=st.lists(DRAWN, max_size=6), waiting=st.lists(DRAWN, max_size=8))
def test_what_enters_keeps_every_gap_and_what_waits_would_not(running: list[Drawn], waiting: list[Drawn]) -> None:
    batch = RunningBatch(num_blocks=500, block_size=16, max_running_requests=40, packing=SlackPack(SHARE, EasyCosts()))
    for number, one in enumerate(running):
        candidate = one.candidate(f"running{number}")
        block_ids = batch.blocks_if_fits(candidate)
        assert block_ids is not None
        batch.enter(candidate, block_ids, one.context_len - 1, NOW)
    assert batch.admission is not None
    named = {f"waiting{number}": one for number, one in enumerate(waiting)}
    candidates = [one.candidate(name) for name, one in named.items()]
    entered = [named[str(one.request.request_id)] for one in batch.admission.within(candidates, (), NOW)]
    there = list(running)
    new: list[Drawn] = []  # of which nothing is counted that they are ahead
    for one in entered:
        is_alone = not there and not new
        assert is_alone or iteration_s([*there, *new, one]) <= bound_s(there, new, one)
        new.append(one)
    left = [one for one in waiting if all(one is not other for other in entered)]  # two may be drawn alike
    if left:
        assert there or new, "one enters an idle worker"
        assert any(iteration_s([*there, *new, one]) > bound_s(there, new, one) for one in left)
    has_waited = [NOW - one.began_s >= PATIENCE_S for one in entered]
    if any(NOW - one.began_s >= PATIENCE_S for one in left):
        assert all(has_waited), "one that has waited is passed by one that has not"
