"""A colocated worker whose pass stops for a chat, step by step."""

from typing import Any

import msgspec
import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass, SampledToken, SamplingParams
from alignedserve.messages.events import Received, Send, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.iterations import IterationCompleted, IterationTimes, RunIteration
from alignedserve.messages.request_notes import Cause, RequestsNoted
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest, RequestFinished
from alignedserve.process.logic_driver import request_id_of
from alignedserve.scheduling.scheduler_state import SchedulerState
from alignedserve.scheduling.yielding import YieldConfig, Yielding
from alignedserve.worker_core.part import WorkerCommand
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from tests.harnesses.colocated import EOS, ColocatedHarness, added, run, runs
from tests.harnesses.scheduling import Step
from tests.support.samples import ROUTER, request

DOCUMENT = request("document", prompt_len=30, request_class=RequestClass.BEST_EFFORT)
CHAT, OTHER = request("chat"), request("other", prompt_len=6)


def working(**sizes: Any) -> ColocatedHarness:
    """A worker that computes ten tokens of a document."""
    made = ColocatedHarness(yielding=Yielding(YieldConfig(10)), **sizes)
    made.begin(DOCUMENT)
    made.follow(Step(document=10))
    return made


def urgent(command: RunIteration) -> RunIteration:
    return msgspec.structs.replace(command, is_urgent=True)


def ended(made: ColocatedHarness, **tokens: int) -> list[WorkerCommand]:
    """End the urgent iteration with these tokens."""
    return made.completed(*(SampledToken(RequestId(name), token) for name, token in tokens.items()), is_urgent=True)


def told(commands: list[WorkerCommand], kind: type) -> list[str]:
    messages = [one.message for one in commands if isinstance(one, Send)]
    return [str(request_id_of(message)) for message in messages if isinstance(message, kind)]


def test_a_chat_has_its_token_before_the_pass_ends() -> None:
    made = working()
    assert runs(made.begin(CHAT)) == [urgent(run(added(CHAT, 3), chat=4))]
    assert made.loads[-1].num_running == 2
    assert told(ended(made, chat=7), PrefillCompleted) == ["chat"]
    made.script.steps.append(Step(document=9, chat=1))
    assert runs(made.sampled()) == [run(grown=[("document", 4, 5), ("chat", 6)], document=9, chat=1)]


def test_a_burst_of_prompts_costs_a_pass_that_cannot_stop_no_look_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand texts of a ranking once held a chat for a second: each looked at all that had come before it."""
    made = ColocatedHarness(yielding=Yielding(YieldConfig(10)))
    made.begin(CHAT)
    made.follow(Step(chat=4))
    views: list[object] = []
    monkeypatch.setattr(SchedulerState, "view", lambda *_, **__: views.append(None))
    for number in range(100):
        assert (
            runs(made.begin(request(f"text{number}", sampling=SamplingParams(max_tokens=0, wants_embedding=True))))
            == []
        )
    assert views == []


def test_without_the_rule_it_waits() -> None:
    made = ColocatedHarness()
    made.begin(DOCUMENT)
    made.follow(Step(document=10))
    assert runs(made.begin(CHAT)) == []


def test_a_document_waits_for_the_end() -> None:
    assert runs(working().begin(request("d2", request_class=RequestClass.BEST_EFFORT))) == []


def test_a_pass_that_ends_before_it_could_stop_is_dealt_with_after_the_chat() -> None:
    made = working()
    made.begin(CHAT)
    assert made.sampled() == []
    made.script.steps.append(Step(document=9, chat=1))
    commands = ended(made, chat=7)
    assert told(commands, PrefillCompleted) == ["chat"]
    assert runs(commands) == [run(grown=[("document", 4, 5), ("chat", 6)], document=9, chat=1)]


def test_one_that_comes_during_an_urgent_iteration_has_the_next() -> None:
    made = working()
    made.begin(CHAT)
    assert runs(made.begin(OTHER)) == []
    assert runs(ended(made, chat=7)) == [urgent(run(added(OTHER, 4, 5), other=6))]


def test_a_long_chat_goes_on_within_the_pass() -> None:
    long = request("long", prompt_len=14)
    made = working()
    assert runs(made.begin(long)) == [urgent(run(added(long, 3, 4, 5), long=10))]
    assert runs(ended(made)) == [urgent(run(grown=[("long", 6)], long=4))]


def test_who_ends_within_the_pass_is_told_at_once_and_leaves_after_it() -> None:
    made = working()
    made.begin(CHAT)
    assert told(ended(made, chat=EOS), RequestFinished) == ["chat"]
    made.script.steps.append(Step(document=10))
    assert runs(made.sampled()) == [run(removals=("chat",), grown=[("document", 3, 4)], document=10)]
    assert made.view.memory.num_free == 17


def test_both_may_be_aborted_meanwhile() -> None:
    made = working()
    made.begin(CHAT)
    made.hear(AbortRequest(RequestId("document")))
    made.hear(AbortRequest(RequestId("chat")))
    assert told(ended(made, chat=7), PrefillCompleted) == []
    made.sampled()
    made.begin(OTHER)
    made.follow(Step(other=6))
    assert made.view.memory.num_free == 20


def test_one_that_is_aborted_while_it_waits_is_not_computed() -> None:
    made = working()
    made.begin(CHAT)
    made.begin(OTHER)
    made.hear(AbortRequest(RequestId("other")))
    assert runs(ended(made, chat=7)) == []


def test_the_log_has_both_and_no_time_twice() -> None:
    made = working()
    made.now = 0.004
    made.begin(CHAT)
    made.now = 0.020
    times = IterationTimes(0.006, 0.019, 0.001, 0.011, 0.001)
    made.do(IterationCompleted((SampledToken(RequestId("chat"), 7),), times=times, is_urgent=True))
    made.now = 0.040
    made.do(IterationCompleted((), times=IterationTimes(0.001, 0.039, 0.001, 0.023, 0.001, yielded_s=0.013)))
    chat, document = made.logic.iteration_log.records()
    assert (chat.is_urgent, document.is_urgent, document.num_yields) == (True, False, 1)
    assert round(chat.stopping_s, 6) == 0.002
    assert [round(one.wall_s, 6) for one in (chat, document)] == [0.013, 0.027]
    assert [round(one.parts_s, 6) for one in (chat, document)] == [0.013, 0.027]


def test_a_chat_is_explained_when_the_pass_stood_still_for_it_and_ended() -> None:
    made, notes = working(), WorkerNotes(lambda: (), Phases.BOTH)
    times = IterationTimes(0.006, 0.019, 0.001, 0.011, 0.001)
    of_document = RunIteration((), (), (), ((RequestId("document"), 10),))
    notes.observe(None, 0.0, (of_document,))
    for now, event in (
        (0.004, Received(ROUTER, PrefillRequest(CHAT, 1))),
        (0.020, IterationCompleted((SampledToken(RequestId("chat"), 7),), times=times, is_urgent=True)),
        (0.040, IterationCompleted(())),
    ):
        made.now = now
        notes.observe(event, now, made.do(event))
    (sent,) = notes.observe(Ticked(), 0.05, ())
    assert isinstance(sent.message, RequestsNoted)
    assert [f"{1000 * note.at_s:.0f} {note.step.value}" for note in sent.message.notes] == [
        *("4 accepted", "4 started", "6 stood still", "20 prefilled", "20 joined", "40 went on")
    ]
    started, stood_still = sent.message.notes[1:3]
    assert (started.cause, stood_still.num_requests) == (Cause.WITHIN, 1)
