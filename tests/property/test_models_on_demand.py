"""Random histories of models that do not all fit: nothing is cut, nobody waits for ever, memory is never exceeded."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.cluster.deployments.on_demand import (
    DOCUMENTS_TURN_S,
    TURN_S,
    LoadModel,
    ModelDemand,
    ModelUse,
    OnDemandLogic,
    UnloadModel,
)

MEMORY, STEP_S, LOADING_S, KEEP_S = 10, 5.0, 10.0, 120.0
LONGEST_S = 40.0  # of one request
SIZES = {"a": 6, "b": 6, "c": 3, "d": 10}


@dataclass
class Model:
    """One model of the simulated machine."""

    phase: str = "asleep"  # loading, awake, leaving
    until_s: float = 0.0  # that it is loaded
    running: list[tuple[float, bool]] = field(default_factory=list)  # ends of its requests, and which are documents
    waiting: list[tuple[float, bool, float]] = field(default_factory=list)  # since when, documents, how long
    used_s: float = 0.0


class Machine:
    """Performs what the logic decides, and checks each decision."""

    def __init__(self) -> None:
        self.logic, self.now = OnDemandLogic(), 0.0
        self.models = {name: Model() for name in SIZES}
        self.waits: list[tuple[float, bool]] = []  # how long each request waited, and which were documents

    def held(self) -> int:
        return sum(SIZES[name] for name, one in self.models.items() if one.phase != "asleep")

    def ask(self, name: str, is_document: bool, length_s: float) -> None:
        self.models[name].waiting.append((self.now, is_document, length_s))

    def step(self) -> None:
        self.now += STEP_S
        for one in self.models.values():
            self._go_on(one)
        is_changing = any(one.phase in ("loading", "leaving") for one in self.models.values())
        awake = {name: (self._use(one), KEEP_S) for name, one in self.models.items() if one.phase == "awake"}
        demands = {
            name: self._demand(one) for name, one in self.models.items() if one.phase == "asleep" and one.waiting
        }
        commands = self.logic.look(awake, demands, self.now, is_changing=is_changing)
        assert len(commands) <= 1
        assert not (commands and is_changing)
        for command in commands:
            self._perform(command, awake, demands)
        assert self.held() <= MEMORY

    def _perform(
        self,
        command: LoadModel | UnloadModel,
        awake: dict[str, tuple[ModelUse, float]],
        demands: dict[str, ModelDemand],
    ) -> None:
        model = self.models[command.name]
        if isinstance(command, LoadModel):
            assert command.name in demands, "loaded for nobody"
            if self.held() + SIZES[command.name] > MEMORY:
                self.logic.on_refused(command.name, "full", self.now, is_full=True)
            else:
                model.phase, model.until_s = "loading", self.now + LOADING_S
            return
        use, keep_s = awake[command.name]
        if not use.is_idle:
            least = [one for one in demands.values() if one.real_time_s is not None and use.has_documents_alone]
            assert least or max(one.waited_s for one in demands.values()) >= TURN_S, "left before its turn was over"
            assert all(not other.is_idle for other, _ in awake.values()), "left while another one was idle"
        elif use.idle_s < keep_s:
            assert demands, "left before its keep_alive, for nobody"
            idle = [other.idle_s for other, _ in awake.values() if other.is_idle]
            assert use.idle_s == max(idle), "one used less recently stayed"
        model.phase = "leaving"

    def _go_on(self, one: Model) -> None:
        if one.phase == "loading" and self.now >= one.until_s:
            one.phase, one.used_s = "awake", self.now
        if one.running:
            one.used_s = self.now
        one.running = [request for request in one.running if request[0] > self.now]
        if one.phase == "awake" and one.waiting:
            one.used_s = self.now
            one.running += [(self.now + length_s, document) for _, document, length_s in one.waiting]
            self.waits += [(self.now - since_s, document) for since_s, document, _ in one.waiting]
            one.waiting = []
        if one.phase == "leaving" and not one.running:
            one.phase = "asleep"

    def _use(self, one: Model) -> ModelUse:
        documents = sum(document for _, document in one.running)
        return ModelUse(len(one.running), documents, idle_s=0.0 if one.running else self.now - one.used_s)

    def _demand(self, one: Model) -> ModelDemand:
        def longest(documents: bool) -> float | None:
            return max((self.now - since for since, document, _ in one.waiting if document is documents), default=None)

        return ModelDemand(longest(False), longest(True))


ASKED = st.tuples(
    st.integers(0, 3), st.sampled_from(sorted(SIZES)), st.booleans(), st.sampled_from([1.0, 10.0, LONGEST_S])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ASKED, max_size=60))
def test_every_request_is_answered_within_the_turns_of_the_others(asked: list[tuple[int, str, bool, float]]) -> None:
    machine = Machine()
    for steps, name, is_document, length_s in asked:
        for _ in range(steps):
            machine.step()
        machine.ask(name, is_document, length_s)
    # Each of the other models may have a turn, finish what runs, and one more be loaded, before it.
    turn_s = LONGEST_S + LOADING_S + 4 * STEP_S
    bound_s = {False: len(SIZES) * (TURN_S + turn_s), True: len(SIZES) * (DOCUMENTS_TURN_S + turn_s)}
    for _ in range(int(bound_s[True] / STEP_S)):
        if not any(one.waiting for one in machine.models.values()):
            break
        machine.step()
    assert len(machine.waits) == len(asked)
    assert all(wait_s <= bound_s[is_document] for wait_s, is_document in machine.waits)


@given(st.sampled_from(["a", "b"]))
def test_two_chats_that_never_pause_take_turns(first: str) -> None:
    machine = Machine()
    for _ in range(400):
        for name in sorted(["a", "b"], reverse=first == "b"):
            machine.ask(name, is_document=False, length_s=10.0)
        machine.step()
    waits = [wait_s for wait_s, _ in machine.waits]
    assert max(waits) <= 2 * (TURN_S + LOADING_S) + 10.0 + 6 * STEP_S


@given(st.integers(1, 4))
def test_models_leave_once_nobody_asks(count: int) -> None:
    machine = Machine()
    for name in sorted(SIZES)[:count]:
        machine.ask(name, is_document=True, length_s=1.0)
    for _ in range(count * 200):
        machine.step()
    assert machine.held() == 0
