"""The encoder of pictures of a simulated worker: prompts that come with pictures wait until its turns have seen them.

As live: a turn between two iterations, as long as promises allow (scheduling/picture_turns.py), one after another where
there is no iteration, those of real-time requests first, and of documents single steps and rests beside real-time ones.
"""

from collections.abc import Callable

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.events import Received
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.workers import PrefillRequest
from alignedserve.scheduling.picture_turns import TurnLengths
from lab.sim.event_queue import EventQueue

_STEP_S = 0.003  # of an encoder's pass
_RESTS = 9  # after a step of a document's picture, of the step's time
_PROMPT_LEN = 512  # whose tokens tell what one costs
_NEARLY_S = 1e-9

Deliver = Callable[[Received], None]


class _Job:
    def __init__(self, event: Received, left_s: float, *, is_real_time: bool) -> None:
        self.event = event
        self.left_s = left_s
        self.is_real_time = is_real_time
        self.rests_until_s = 0.0


class SimulatedEncoder:
    """Encodes for one worker. `deliver`: takes the messages that have waited."""

    def __init__(self, event_queue: EventQueue, costs: CostModel, deliver: Deliver) -> None:
        self._event_queue = event_queue
        self._deliver = deliver
        self._token_s = _token_s(costs)
        self._jobs: list[_Job] = []
        self._lengths = TurnLengths()
        self._real_time: dict[str, None] = {}  # sequences of the worker that somebody waits for
        self._turn_ends_s: float | None = None  # of one that no iteration follows yet
        self._is_computing = False
        self._epoch = 0

    def takes(self, event: object) -> bool:
        if not isinstance(event, Received) or not isinstance(event.message, PrefillRequest):
            return False
        request = event.message.request
        if not request.num_encoder_tokens:
            return False
        left_s = request.num_encoder_tokens * self._token_s
        self._jobs.append(_Job(event, left_s, is_real_time=request.is_real_time))
        self.go_on()
        return True

    def before(self, command: RunIteration) -> float:
        """Return the seconds that an iteration waits for the encoder, which takes its turn."""
        for request_id in command.removals:
            self._lengths.leave(request_id)
            self._real_time.pop(request_id, None)
        for addition in command.additions:
            self._lengths.enter(addition.request)
            if addition.request.is_real_time:
                self._real_time[addition.request.request_id] = None
        self._is_computing = True
        now = self._event_queue.now
        if self._turn_ends_s is not None:
            return max(self._turn_ends_s - now, 0.0)
        job = self._next(now)
        if job is None:
            return 0.0
        turn_s = self._turn_s(job)
        self._event_queue.at(now + turn_s, self._encoded, (job, turn_s, self._epoch))
        return turn_s

    def ran(self, duration_s: float) -> None:
        self._lengths.ran(duration_s)
        self._is_computing = False

    def go_on(self) -> None:
        now = self._event_queue.now
        if self._is_computing or self._turn_ends_s is not None or not self._jobs:
            return
        job = self._next(now)
        if job is None:  # all rest
            wakes_s = min(one.rests_until_s for one in self._jobs)
            self._event_queue.at(wakes_s, lambda _: self.go_on(), None)
            return
        turn_s = self._turn_s(job)
        self._turn_ends_s = now + turn_s
        self._event_queue.at(self._turn_ends_s, self._idle_turn_ended, (job, turn_s, self._epoch))

    def forget(self) -> None:
        self._jobs.clear()
        self._real_time.clear()
        self._lengths, self._turn_ends_s, self._is_computing = TurnLengths(), None, False
        self._epoch += 1

    def _next(self, now: float) -> _Job | None:
        ready = [job for job in self._jobs if job.rests_until_s <= now]
        return min(ready, key=lambda job: not job.is_real_time, default=None)

    def _gives_way(self, job: _Job) -> bool:
        return not job.is_real_time and bool(self._real_time)

    def _turn_s(self, job: _Job) -> float:
        longest_s = _STEP_S if self._gives_way(job) else max(self._lengths.turn_s, _STEP_S)
        return min(longest_s, job.left_s)

    def _idle_turn_ended(self, turn: tuple[_Job, float, int]) -> None:
        if turn[2] == self._epoch:
            self._turn_ends_s = None
            self._encoded(turn)
            self.go_on()

    def _encoded(self, turn: tuple[_Job, float, int]) -> None:
        job, turn_s, epoch = turn
        if epoch != self._epoch:
            return
        job.left_s -= turn_s
        if self._gives_way(job):
            job.rests_until_s = self._event_queue.now + _RESTS * turn_s
        if job.left_s <= _NEARLY_S:
            self._jobs.remove(job)
            self._deliver(job.event)


def _token_s(costs: CostModel) -> float:
    work = IterationWork()
    work.add_chunk(_PROMPT_LEN, 0, is_last=True)
    return costs.iteration_s(work) / _PROMPT_LEN
