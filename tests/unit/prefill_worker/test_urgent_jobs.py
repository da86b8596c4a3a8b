"""A prefill worker whose pass stops for a chat: twelve blocks of four tokens, ten tokens an iteration."""

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import ReserveBlocks
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.yielding import YieldConfig, Yielding
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.prefill import PrefillHarness, added, run, token
from tests.harnesses.scheduling import EasyCosts, Script, Step
from tests.support.samples import request

DOCUMENT = request("document", prompt_len=14, request_class=RequestClass.BEST_EFFORT)
CHAT = request("chat")


class Case:
    """A worker that computes ten tokens of a document."""

    def __init__(self) -> None:
        self.script = Script()
        scheduler = Scheduler(self.script, EasyCosts(), IterationLimits(3, 10))
        self.worker = PrefillHarness(scheduler=PolicyIterationScheduler(scheduler, Yielding(YieldConfig(10))))
        self.script.steps.append(Step(document=10))
        self.worker.begin(DOCUMENT)

    def begin_chat(self) -> list[RunIteration]:
        return runs(self.worker.begin(CHAT))

    def chat_ended(self) -> list[WorkerCommand]:
        return self.worker.do(IterationCompleted((token(7, "chat"),), is_urgent=True))


def runs(commands: list[WorkerCommand]) -> list[RunIteration]:
    return [one for one in commands if isinstance(one, RunIteration)]


def reserving(commands: list[WorkerCommand]) -> list[str]:
    messages = [one.message for one in commands if isinstance(one, Send)]
    return [message.request_id for message in messages if isinstance(message, ReserveBlocks)]


def test_a_chat_leaves_before_the_pass_ends() -> None:
    case = Case()
    (iteration,) = case.begin_chat()
    assert (iteration.slices, iteration.is_urgent) == (((RequestId("chat"), 4),), True)
    assert iteration.additions == (added(CHAT, 4),)
    assert reserving(case.chat_ended()) == ["chat"]
    case.script.steps.append(Step(document=4))
    assert runs(case.worker.sampled()) == [run(slices={"document": 4}, removals=("chat",))]


def test_a_pass_that_ends_before_it_could_stop_is_dealt_with_after_the_chat() -> None:
    case = Case()
    case.begin_chat()
    assert case.worker.sampled() == []
    case.script.steps.append(Step(document=4))
    commands = case.chat_ended()
    assert reserving(commands) == ["chat"]
    assert runs(commands) == [run(slices={"document": 4}, removals=("chat",))]


def test_a_document_of_the_stopped_pass_that_is_aborted_leaves_after_it() -> None:
    case = Case()
    case.begin_chat()
    case.worker.hear(AbortRequest(RequestId("document")))
    assert runs(case.chat_ended()) == []
    case.worker.sampled()
    case.script.steps.append(Step(next=4))
    assert runs(case.worker.begin(request("next")))[0].removals == ("chat", "document")
