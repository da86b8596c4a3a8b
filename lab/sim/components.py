"""Simulated components: each passes events to a live logic and turns its commands into later events."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from alignedserve.core.request import SampledToken
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.events import (
    TICK_S,
    Dial,
    HangUp,
    Logic,
    PeerConnected,
    PeerDisconnected,
    Received,
    Send,
    SendTo,
    StopDialling,
    Ticked,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BufferOpened,
    CloseBuffer,
    IterationCompleted,
    IterationTimes,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    RunIteration,
    UnmapArena,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest, RegistrationRefused
from alignedserve.scheduling.picture_turns import TurnLengths
from lab.sim.config import SimLinks
from lab.sim.copies import Job, SharedCores, SimulatedArena, SimulatedCopier
from lab.sim.engine import SimulatedEngine
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


Performers = Mapping[type, Callable[[Any], None]]
_TICK = Ticked()
_LEAST_MEASURED = 0.1  # of an iteration's time, by its engine
_DIALLING = (Dial, StopDialling, HangUp)  # the simulated cluster is linked when it is built


AnyLogic = Logic[Any, Any]


def _no_gateway(message: Message) -> None:
    raise AssertionError("there is no gateway")


class Network:
    """Carries messages between components in order, as each has the same latency."""

    def __init__(self, event_queue: EventQueue, links: SimLinks, seed: int = 0) -> None:
        self._event_queue = event_queue
        self._links = links
        self._random = random.Random(seed)  # noqa: S311
        self.message_s = links.message_s
        self.token_s = links.message_s if links.token_s is None else links.token_s
        self._dispatch_of: dict[str, Callable[[Any], None]] = {}
        self._roles: dict[str, Role] = {}
        self._linked: dict[str, list[str]] = {}  # every component's peers, in the order of their links
        self.to_gateway: Callable[[Any], None] = _no_gateway  # takes what workers send to the address of a gateway

    def submit_s(self) -> float:
        """Return the time of the next request from its arrival to the router, what its gateway does first included."""
        links = self._links
        if links.submit_times_s:
            return self._random.choice(links.submit_times_s)
        return links.message_s if links.submit_s is None else links.submit_s

    def add(self, name: str, role: Role, dispatch: Callable[[Any], None]) -> None:
        self._dispatch_of[name] = dispatch
        self._roles[name] = role

    def link(self, one: str, other: str) -> None:
        self._linked.setdefault(one, []).append(other)
        self._linked.setdefault(other, []).append(one)
        self._introduce(one, other)

    def lose(self, name: str) -> None:
        """Break all links of a component that is lost; its peers get PeerDisconnected after what it has sent."""
        for peer in self._linked[name]:
            self.deliver(peer, PeerDisconnected(self._roles[name], name))

    def link_again(self, name: str) -> None:
        """Link a component that is back with all its former peers, the latest first."""
        for peer in reversed(self._linked[name]):
            self._introduce(peer, name)

    def _introduce(self, one: str, other: str) -> None:
        self._event_queue.after(0.0, self._dispatch_of[one], PeerConnected(self._roles[other], other))
        self._event_queue.after(0.0, self._dispatch_of[other], PeerConnected(self._roles[one], one))

    def send(self, source: str, target: str, message: Message) -> None:
        self.deliver(target, Received(source, message))

    def deliver(self, target: str, event: Any, delay_s: float | None = None) -> None:
        """Deliver an event as if it were a message sent now: after those sent before, or after its own delay."""
        self._event_queue.after(self.message_s if delay_s is None else delay_s, self._dispatch_of[target], event)


class SimulatedComponent:
    """One logic on the network. `performers`: functions that perform commands other than messages, by class."""

    def __init__(self, name: str, role: Role, logic: AnyLogic, event_queue: EventQueue, network: Network) -> None:
        self.name = name
        self.role = role
        self.performers: Performers = {}
        self.num_events = 0
        self.logic = logic
        self.is_lost = False
        self.holds: Callable[[Any], bool] = lambda _: False  # takes an event that is to wait
        self._event_queue = event_queue
        self._network = network
        network.add(name, role, self.dispatch)

    def dispatch(self, event: Any) -> None:
        """Pass an event to the logic and perform its commands; a lost process does nothing."""
        if not (self.is_lost or self.holds(event)):
            self.deliver(event)

    def deliver(self, event: Any) -> None:
        self.num_events += 1
        commands: Sequence[Any] = self.logic.on_event(event, self._event_queue.now)
        for command in commands:
            kind = type(command)
            if kind is Send:
                assert type(command.message) is not RegistrationRefused, command.message
                self._network.send(self.name, command.peer, command.message)
            elif kind is SendTo:
                self._network.to_gateway(command.message)
            elif kind not in _DIALLING:
                self.performers[kind](command)

    def lose(self) -> None:
        """End as a killed process does: its state is gone, and its peers learn of the loss."""
        self.is_lost = True
        self._network.lose(self.name)

    def restart(self, logic: AnyLogic) -> None:
        self.logic, self.is_lost = logic, False
        self._network.link_again(self.name)

    def tick_from(self, time_s: float) -> None:
        self._event_queue.at(time_s, self._tick, _TICK)

    def _tick(self, tick: Ticked) -> None:
        self._event_queue.after(TICK_S, self._tick, tick)
        self.dispatch(tick)


class _Flight:
    __slots__ = (
        *("duration_s", "ends_s", "job", "measured", "sampled", "started_s"),
        *("straggler_share", "turn_s", "yielded_s"),
    )

    def __init__(
        self,
        started_s: float,
        duration_s: float,
        sampled: tuple[SampledToken, ...],
        measured: float,
        straggler_share: float,
        turn_s: float = 0.0,
    ) -> None:
        self.started_s = started_s + turn_s
        self.turn_s = turn_s
        self.duration_s = duration_s  # by itself
        self.sampled = sampled
        self.measured = measured  # share of its time, by its engine
        self.straggler_share = straggler_share
        self.ends_s = self.started_s + duration_s
        self.yielded_s = 0.0
        self.job: Job | None = None  # on shared cores

    def stop(self, now: float, part_s: float, urgent_s: float) -> tuple[float, float]:
        begins_s = now + max(self.ends_s - now, 0.0) % part_s
        self.ends_s += urgent_s
        return begins_s, begins_s + urgent_s

    def times(self, started_s: float, duration_s: float, yielded_s: float = 0.0) -> IterationTimes:
        share, finished_s = self.straggler_share, started_s + duration_s + yielded_s
        times = IterationTimes(started_s, finished_s, 0.0, duration_s, 0.0, straggler_share=share, yielded_s=yielded_s)
        return msgspec.structs.replace(times, turn_s=self.turn_s) if self.turn_s else times


class SimulatedWorker:
    """Performs a worker's commands other than messages: iterations and, concurrently, copies."""

    def __init__(
        self,
        component: SimulatedComponent,
        engine: SimulatedEngine,
        copier: SimulatedCopier,
        memory: "SharedMemory",
        event_queue: EventQueue,
        *,
        make_logic: Callable[[], AnyLogic],
        num_layers: int,
        unmeasured_costs: CostModel | None = None,
    ) -> None:
        """`make_logic`: makes the logic of the same worker started again. `num_layers`: of the model, between which a
        pass may stop. `unmeasured_costs`: see SimConfig."""
        self._make_logic = make_logic
        self._num_layers = num_layers
        self._flight: _Flight | None = None
        self._unmeasured_costs = unmeasured_costs
        self._num_losses = 0
        self.component = component
        self.engine = engine
        self._copier = copier
        self._memory = memory
        self._event_queue = event_queue
        self._encoder = SimulatedEncoder(event_queue, engine.costs, component.deliver)
        component.holds = self._encoder.takes
        component.performers = {
            RunIteration: self._run_iteration,
            LoadBlocks: partial(self._copy, copier.load_ends_s, copier.loaded),
            OffloadBlocks: partial(self._copy, copier.offload_ends_s, copier.offloaded),
            RelayBlocks: partial(self._copy, copier.relay_ends_s, copier.relayed),
            MapArena: self._map_arena,
            UnmapArena: self._unmap_arena,
            OpenBuffer: self._open_buffer,
            CloseBuffer: self._unmap_arena,
        }

    def lose(self) -> None:
        self._num_losses += 1
        self._encoder.forget()
        self.component.lose()

    def restart(self) -> None:
        self.engine.forget()
        self._copier.arenas.clear()
        self.component.restart(self._make_logic())

    def _unless_lost(self, action: Callable[[Any], None]) -> Callable[[Any], None]:
        begun = self._num_losses

        def act(given: Any) -> None:
            if begun == self._num_losses:
                action(given)

        return act

    def _run_iteration(self, command: RunIteration) -> None:
        now = self._event_queue.now
        duration_s, sampled = self.engine.begin(command, now)
        measured = 1.0  # share of the time
        if self._unmeasured_costs is not None and duration_s > 0.0:
            unmeasured_s = self._unmeasured_costs.iteration_s(self.engine.latest_work)
            measured = max(1.0 - unmeasured_s / duration_s, _LEAST_MEASURED)
        turn_s = 0.0 if command.is_urgent else self._encoder.before(command)
        flight = _Flight(now, duration_s, sampled, measured, self.engine.latest_straggler_share, turn_s)
        if command.is_urgent:
            self._run_within(flight)
            return
        self._flight = flight
        if self._memory.cores is not None:
            ended = self._unless_lost(lambda _: self._end(flight))
            has_prompt = self.engine.latest_work.num_chunks > 0
            flight.job = self._memory.cores.begin(duration_s + turn_s, has_prompt, partial(ended, None))
            return
        self._event_queue.at(flight.ends_s, self._unless_lost(self._end), flight)

    def _run_within(self, urgent: _Flight) -> None:
        flight, cores, urgent_s = self._flight, self._memory.cores, urgent.duration_s
        assert flight is not None, "an urgent iteration within none"
        part_s = flight.duration_s / self._num_layers
        if cores is not None and flight.job is not None:
            begins_s, ends_s = cores.stop(flight.job, part_s=part_s, urgent_s=urgent_s)
        else:
            begins_s, ends_s = flight.stop(urgent.started_s, part_s, urgent_s)
        flight.yielded_s += ends_s - begins_s
        self.engine.ran_within(begins_s, ends_s)
        times = urgent.times(begins_s, (ends_s - begins_s) * urgent.measured)
        event = IterationCompleted(urgent.sampled, times=times, is_urgent=True)
        self._event_queue.at(ends_s, self._unless_lost(self.component.dispatch), event)

    def _end(self, flight: _Flight) -> None:
        if flight.job is None and self._event_queue.now < flight.ends_s:  # it has stood still
            self._event_queue.at(flight.ends_s, self._unless_lost(self._end), flight)
            return
        taken_s = flight.duration_s
        if flight.job is not None:
            taken_s = self._event_queue.now - flight.started_s - flight.yielded_s
            self.engine.prolong(taken_s - flight.duration_s)
        times = flight.times(flight.started_s, flight.measured * taken_s, flight.yielded_s)
        self._encoder.ran(taken_s)
        self.component.dispatch(IterationCompleted(flight.sampled, times=times))
        self._encoder.go_on()

    def _copy(self, ends_s: Callable[[Any], float], outcome: Callable[[Any], Any], command: object) -> None:
        ended = self._unless_lost(lambda _: self.component.dispatch(outcome(command)))
        self._event_queue.at(ends_s(command), ended, None)

    def _map_arena(self, command: MapArena) -> None:
        self._copier.arenas[command.peer] = self._memory.arenas[command.offered.path]

    def _unmap_arena(self, command: UnmapArena | CloseBuffer) -> None:
        self._copier.arenas.pop(command.peer, None)

    def _open_buffer(self, command: OpenBuffer) -> None:
        offered = self._memory.make_buffer(f"{self.component.name}-for-{command.peer}", self._copier.pool)
        if offered is not None:
            self._copier.arenas[command.peer] = self._memory.arenas[offered.path]
        self._event_queue.after(0.0, self.component.dispatch, BufferOpened(command.peer, command.link_epoch, offered))


class SharedMemory:
    """Resources shared by the workers of a node: every arena by its path, and perhaps the cores."""

    def __init__(self, *, block_bytes: int, buffer_blocks: int, cores: SharedCores | None = None) -> None:
        self.cores = cores
        self.arenas: dict[str, SimulatedArena] = {}
        self._block_bytes = block_bytes
        self._buffer_blocks = buffer_blocks

    def make_pool(self, path: str, num_blocks: int, layout_digest: str) -> ArenaOffered:
        self.arenas[path] = SimulatedArena(num_blocks, stamps_on_write=False)
        return ArenaOffered(path, num_blocks, self._block_bytes, layout_digest)

    def make_buffer(self, path: str, pool: str) -> ArenaOffered | None:
        """Create a candidate buffer on the node of this pool; return None if there are none."""
        if not self._buffer_blocks:
            return None
        self.arenas[path] = SimulatedArena(self._buffer_blocks, stamps_on_write=True)
        return ArenaOffered(path, self._buffer_blocks, self._block_bytes, "", pool_name=pool)
