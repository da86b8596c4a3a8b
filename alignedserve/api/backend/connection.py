"""The links of one gateway, or of the batch worker, to the routers and workers of every deployment."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from alignedserve.api.timelines.questions import TimelineQuestions
from alignedserve.api.timelines.timeline import Timelines
from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import PromptScored, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import GatewayInbound
from alignedserve.messages.request_notes import AskTimeline, RequestsNoted, StandingsTold, TimelineTold
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import AddressBook
from alignedserve.process.link_manager import LinkHandler, LinkManager
from alignedserve.process.links import Identity, Peer
from alignedserve.process.process_spec import ProcessSpec


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """Identity and addresses of this process's links into the cluster."""

    identity: Identity
    own_address: str  # where workers send tokens
    book: AddressBook  # where names are found
    prefix_key: bytes = field(default=b"", repr=False)  # of the cluster's block hashes; never in a log
    log_folder: Path | None = None  # where processes of this host write their logs; None: nowhere

    @property
    def node(self) -> str:
        """The node of this process; empty on a single host."""
        return self.book.node

    @classmethod
    def of(cls, process_spec: ProcessSpec) -> "ClusterLinks":
        """Return the links of a process of the cluster."""
        return cls(
            process_spec.identity(),
            process_spec.name,
            process_spec.addresses,
            process_spec.prefix_key(),
            process_spec.log_folder,
        )


class DeploymentHandler(LinkHandler, Protocol):
    """Handles the events of the links to one deployment: to its router and its workers."""

    def is_open(self, request_id: RequestId) -> bool:
        """Return whether this request was sent to the deployment and has not ended."""


class ClusterConnection:
    """Listens for all workers and dials every router. A worker belongs to the deployment whose request it answers."""

    def __init__(
        self, links: ClusterLinks, timelines: Timelines | None = None, questions: TimelineQuestions | None = None
    ) -> None:
        """`timelines`: get what the cluster notes; None: nobody wants to know. `questions`: of other gateways."""
        self.links = links
        self.timelines = timelines
        self._questions = questions
        if questions is not None:
            questions.connect(links.identity.name, self._ask_router, self._ask_routers)
        self._manager = LinkManager(links.identity, Codec(GatewayInbound), self, links.book)
        self._handlers: dict[str, DeploymentHandler] = {}  # by the router's name
        self._of_worker: dict[str, DeploymentHandler] = {}  # of those that have answered, by their names

    async def start(self) -> None:
        """Listen for workers. Raises PeerError."""
        await self._manager.listen(self.links.own_address)

    async def close(self) -> None:
        """Close every link."""
        await self._manager.close()

    def join(self, router: str, handler: DeploymentHandler) -> None:
        """Dial this router until `leave`, and hand what comes from its deployment to the handler."""
        assert router not in self._handlers, "a router of two deployments"
        self._handlers[router] = handler
        self._manager.dial(router)

    def leave(self, router: str) -> None:
        """Close the link to this router; nothing more is handed over, not the loss of the link either."""
        handler = self._handlers.pop(router, None)
        if handler is None:
            return
        self._of_worker = {worker: other for worker, other in self._of_worker.items() if other is not handler}
        self._manager.hang_up(router)

    def send(self, router: str, message: Message) -> bool:
        """Send to a router; False when there is no link to it."""
        return self._manager.send(router, message)

    def send_later(self, router: str, message: Message) -> None:
        """Send to a router, now or once there is a link to it."""
        self._manager.send_to(router, message)

    # --- LinkHandler

    def on_linked(self, peer: Peer) -> None:
        """Let a router's deployment know; workers introduce themselves with their answers."""
        handler = self._handlers.get(peer.name)
        if peer.role is Role.ROUTER and handler is not None:
            handler.on_linked(peer)

    def on_message(self, peer: Peer, message: Message) -> None:
        """Hand a message to the deployment that it is from; what no open request waits for is dropped."""
        if isinstance(message, RequestsNoted | AskTimeline | TimelineTold | StandingsTold):
            self._on_timelines(peer, message)
            return
        handler = self._handlers.get(peer.name) if peer.role is Role.ROUTER else self._of_worker.get(peer.name)
        if handler is None and peer.role is not Role.ROUTER:
            handler = self._find(message)
            if handler is not None:
                self._of_worker[peer.name] = handler
        if handler is not None:
            handler.on_message(peer, message)

    def on_lost(self, peer: Peer) -> None:
        """Let the deployment know; one whose worker has not answered here yet cannot be told from the others."""
        if peer.role is Role.ROUTER:
            known = self._handlers.get(peer.name)
        else:
            known = self._of_worker.pop(peer.name, None)
        if known is not None:
            known.on_lost(peer)
        elif peer.role is not Role.ROUTER:
            for handler in tuple(self._handlers.values()):
                handler.on_lost(peer)

    def _on_timelines(self, peer: Peer, message: RequestsNoted | AskTimeline | TimelineTold | StandingsTold) -> None:
        match message:
            case RequestsNoted() if self.timelines is not None:
                self.timelines.take(peer.name, message)
            case AskTimeline():
                nothing = TimelineTold(message.number, message.asker)
                self._manager.send(peer.name, nothing if self._questions is None else self._questions.answer(message))
            case TimelineTold() if self._questions is not None:
                self._questions.told(message)
            case StandingsTold() if self._questions is not None and peer.role is Role.ROUTER:
                self._questions.told_standings(message)

    def _ask_router(self, message: Message) -> bool:
        return any(self._manager.send(router, message) for router in self._handlers)

    def _ask_routers(self, message: Message) -> int:
        return sum(self._manager.send(router, message) for router in self._handlers)

    def _find(self, message: Message) -> DeploymentHandler | None:
        request_ids = tuple(_requests_of(message))
        for handler in self._handlers.values():
            if any(handler.is_open(request_id) for request_id in request_ids):
                return handler
        return None


def _requests_of(message: Message) -> Iterator[RequestId]:
    match message:
        case TokensEmitted():
            yield from (delta.request_id for delta in message.deltas)
        case PromptScored():
            yield message.request_id
