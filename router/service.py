"""The router at work: its logic and its links, joined."""

from typing import NoReturn

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.messages.events import CommonEvent
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.wire import Codec
from alignedserve.runtime.links import Identity
from alignedserve.runtime.room import Room
from router.logic import RouterLogic
from router.policies import make_prefill_order


class Router:
    """The one router of a cluster. Everybody dials it."""

    def __init__(self, *, config: RouterConfig, batching: BatchingConfig, identity: Identity) -> None:
        logic = RouterLogic(config=config, batching=batching, order=make_prefill_order(config.prefill_order))
        self._room: Room[CommonEvent, NoReturn] = Room(logic, identity, Codec(RouterInbound), _nothing_else)

    async def start(self, *, listen_at: str) -> None:
        """Accept gateways, workers and pools."""
        await self._room.switchboard.listen(listen_at)

    async def close(self) -> None:
        """Drop the links."""
        await self._room.close()


def _nothing_else(command: NoReturn) -> None:
    raise AssertionError("the router only sends messages")
