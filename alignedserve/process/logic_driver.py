"""The driver of a logic: feeds events, sends messages and performs commands."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from alignedserve.messages.caches import BatchGranted
from alignedserve.messages.events import (
    TICK_S,
    CommonEvent,
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
from alignedserve.messages.wire import Codec, Message
from alignedserve.messages.workers import RegistrationRefused
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Peer
from alignedserve.process.logs import FIELDS, about_request
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.recorder import Recorder

Prepare = Callable[[Message], "Sequence[Future[Any]]"]
logger = logging.getLogger(__name__)

EventT = TypeVar("EventT", contravariant=True)
CommandT = TypeVar("CommandT")
LinkCommand = Send | SendTo | Dial | StopDialling | HangUp


class _Held(NamedTuple):
    peer: str
    message: Message
    subjects: frozenset[str]  # subjects; later messages with a common subject stay behind
    prepared: Sequence[Future[Any]]

    @property
    def is_ready(self) -> bool:
        return all(future.done() for future in self.prepared)

    @property
    def is_cancelled(self) -> bool:
        return any(future.cancelled() for future in self.prepared)


class HeldMessages:
    """Delivers messages, at once or once they are prepared. Used on one event loop. Messages about one request stay in
    order, likewise batches of one pool; other messages pass. A message is dropped if what it waits for is cancelled:
    its request has ended, as the message behind it says."""

    def __init__(self, prepare: Prepare, deliver: Callable[[str, Message], None]) -> None:
        """`prepare`: begins what a message needs, and returns what it has to wait for. `deliver`: takes the peer and
        the message."""
        self._prepare = prepare
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._held: list[_Held] = []

    def take(self, peer: str, message: Message) -> None:
        prepared = [future for future in self._prepare(message) if not future.done()]
        if not prepared and not self._held:
            self._deliver(peer, message)
            return
        held = _Held(peer, message, _subjects_of(peer, message), prepared)
        if not prepared and not any(held.subjects & earlier.subjects for earlier in self._held):
            self._deliver(peer, message)
            return
        self._held.append(held)
        for future in prepared:
            future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._release))

    def drop(self, peer: str) -> None:
        self._held = [held for held in self._held if held.peer != peer]
        self._release()

    def close(self) -> None:
        self._held.clear()

    def _release(self) -> None:
        waiting, self._held = self._held, []
        subjects: set[str] = set()
        for held in waiting:
            if held.is_cancelled:
                continue
            if held.is_ready and not held.subjects & subjects:
                self._deliver(held.peer, held.message)
            else:
                subjects |= held.subjects
                self._held.append(held)


def _subjects_of(peer: str, message: Message) -> frozenset[str]:
    if isinstance(message, BatchGranted):  # one may join that before it
        return frozenset((peer, *(handoff.request.request_id for handoff in message.handoffs)))
    request_id = request_id_of(message)
    return frozenset() if request_id is None else frozenset((request_id,))


def request_id_of(message: Message) -> str | None:
    about = getattr(message, "request", message)
    request_id: str | None = getattr(about, "request_id", None)
    return request_id


def _log_step(way: str, peer: str, message: Message) -> None:
    request_id = request_id_of(message)
    if request_id is not None:
        name = type(message).__name__
        fields = {"request_id": request_id, "step": name, way: peer}
        logger.info("request %s: %s %s %s", request_id, name, way, peer, extra={FIELDS: fields})


class Observer(Protocol):
    """Sees what a logic was told and decided."""

    def observe(self, event: Any, now: float, commands: Sequence[Any]) -> Sequence[Send | SendTo]:
        """Look at a decision, once its commands are performed; return what else is to be sent. Must be quick."""


class Relay(Protocol):
    """Passes messages on that are none of the logic's business."""

    def relay(self, peer: str, message: Message, now: float) -> Sequence[Send] | None:
        """Return what is to be sent for this message; None: it is for the logic."""


class Meter(Protocol):
    """Measures beside the logic, and adds to its messages to gateways what it has measured."""

    def happened(self, event: Any) -> None:
        """Note an event, before the logic gets it."""

    def commanded(self, command: Any) -> None:
        """Note a command that has been performed."""

    def told(self, message: Message) -> Message:
        """Return a message to a gateway with what it adds."""

    def left_over(self) -> Sequence[SendTo]:
        """Return what else is to be sent, once all messages of a decision are."""


class LogicDriver(Generic[EventT, CommandT]):
    """Feeds a logic with events and performs its commands. Runs on one event loop."""

    def __init__(
        self,
        logic: Logic[CommonEvent | EventT, CommandT],
        process_spec: ProcessSpec,
        codec: Codec,
        perform: Callable[[CommandT], None],
        recorder: Recorder | None = None,
        prepare: Prepare | None = None,
        observer: Observer | None = None,
        relay: Relay | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`prepare`: begins what a message needs before the logic gets it, see HeldMessages. `observer`: sees every
        decision. `relay`: gets every message before the logic. `meter`: see Meter."""
        self.links = LinkManager(process_spec.identity(), codec, self, process_spec.addresses)
        self._logic = logic
        self._perform = perform
        self._recorder = recorder
        self._observer = observer
        self._relay = relay
        self._meter = meter
        self._held = None if prepare is None else HeldMessages(prepare, self._receive)
        self._logs_steps = process_spec.logs_steps
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def dispatch(self, event: CommonEvent | EventT) -> None:
        now = time.monotonic()
        if self._meter is not None:
            self._meter.happened(event)
        commands = self._logic.on_event(event, now)
        if self._recorder is not None:
            self._recorder.add(event, now, commands)
        self._perform_all(commands)
        if self._observer is not None:
            self._perform_all(self._observer.observe(event, now, commands))
        if self._meter is not None:
            for left in self._meter.left_over():
                self.links.send_to(left.address, left.message)
        if self._recorder is not None:
            self._recorder.write()

    def _perform_all(self, commands: Sequence[LinkCommand | CommandT]) -> None:
        for command in commands:
            if isinstance(command, Send):
                if self._logs_steps:
                    _log_step("to", command.peer, command.message)
                self.links.send(command.peer, command.message)
            elif isinstance(command, SendTo):
                message = command.message if self._meter is None else self._meter.told(command.message)
                self.links.send_to(command.address, message)
            elif isinstance(command, Dial):
                self.links.dial(command.address)
            elif isinstance(command, StopDialling):
                self.links.stop_dialling(command.address)
            elif isinstance(command, HangUp):
                self.links.hang_up(command.address)
            else:
                self._perform(command)
                if self._meter is not None:
                    self._meter.commanded(command)

    def on_linked(self, peer: Peer) -> None:
        self.dispatch(PeerConnected(peer.role, peer.name))

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, RegistrationRefused):
            logger.error("the router refuses this process: %s", message.reason)
            return
        passed_on = self._relay.relay(peer.name, message, time.monotonic()) if self._relay else None
        if passed_on is not None:
            self._perform_all(passed_on)
        elif self._held is None:
            self._receive(peer.name, message)
        else:
            self._held.take(peer.name, message)

    def on_lost(self, peer: Peer) -> None:
        if self._held is not None:
            self._held.drop(peer.name)
        self.dispatch(PeerDisconnected(peer.role, peer.name))

    async def close(self) -> None:
        self._timer.cancel()
        if self._held is not None:
            self._held.close()
        await self.links.close()
        if self._recorder is not None:
            self._recorder.close()

    def _receive(self, peer: str, message: Message) -> None:
        request_id = request_id_of(message)
        if request_id is None:
            self.dispatch(Received(peer, message))
            return
        with about_request(request_id):
            if self._logs_steps:
                _log_step("from", peer, message)
            self.dispatch(Received(peer, message))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.dispatch(Ticked())
