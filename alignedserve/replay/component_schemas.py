"""The table for reading recordings: each component's factory, messages and events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec

from alignedserve.messages.events import Logic, PeerConnected, PeerDisconnected, Received, Ticked
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    IterationCompleted,
)
from alignedserve.messages.links import DecodeWorkerInbound, PoolInbound, PrefillWorkerInbound, RouterInbound
from alignedserve.messages.recording import Decision, RecordReader
from decode_worker import factory as decode_factory
from kvpool import factory as pool_factory
from prefill_worker import factory as prefill_factory
from router import factory as router_factory
from router.state import DrainRequested, LengthPredicted


@dataclass(frozen=True, slots=True)
class ComponentSchema:
    """Factory and events of one kind of component."""

    make: Callable[..., Logic[Any, Any]]
    inbound: Any  # union of its messages
    events: tuple[type, ...] = ()  # beside those of every component
    _decoders: dict[str, msgspec.msgpack.Decoder[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for kind in (PeerConnected, PeerDisconnected, Ticked, *self.events):
            self._decoders[kind.__name__] = msgspec.msgpack.Decoder(kind)
        self._decoders[Received.__name__] = msgspec.msgpack.Decoder(GenericAlias(tuple, (str, self.inbound)))

    def arguments(self, recorded: msgspec.Raw) -> dict[str, Any]:
        """Decode the arguments of `make`. Raises msgspec.ValidationError if they are not the function's."""
        hints = get_type_hints(self.make)
        fields = [
            (name, hints[name]) if parameter.default is parameter.empty else (name, hints[name], parameter.default)
            for name, parameter in signature(self.make).parameters.items()
        ]
        schema = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)
        decoded = msgspec.msgpack.decode(recorded, type=schema)
        return {name: getattr(decoded, name) for name, *_ in fields}

    def event(self, decision: Decision) -> Any:
        """Decode the event of a decision. Raises msgspec.ValidationError for one of another component."""
        decoder = self._decoders.get(decision.kind)
        if decoder is None:
            raise msgspec.ValidationError(f"no event of this component is called {decision.kind[:64]!r}")
        event = decoder.decode(decision.event)
        return Received(*event) if decision.kind == Received.__name__ else event


_SCHEMAS: dict[str, ComponentSchema] = {
    f"{kind.make.__module__}.{kind.make.__name__}": kind
    for kind in (
        ComponentSchema(router_factory.make_logic, RouterInbound, (LengthPredicted, DrainRequested)),
        ComponentSchema(pool_factory.make_logic, PoolInbound),
        ComponentSchema(
            prefill_factory.make_logic,
            PrefillWorkerInbound,
            (IterationCompleted, BlocksLoaded, BlocksOffloaded, BlocksRelayed, BufferOpened),
        ),
        ComponentSchema(
            decode_factory.make_logic, DecodeWorkerInbound, (IterationCompleted, BlocksLoaded, BlocksOffloaded)
        ),
        ComponentSchema(
            decode_factory.make_colocated_logic,
            DecodeWorkerInbound,
            (IterationCompleted, BlocksLoaded, BlocksOffloaded, BufferOpened),
        ),
    )
}


def schema_of(reader: RecordReader) -> ComponentSchema:
    """Return the schema of a recording. Raises RecordingError."""
    kind = _SCHEMAS.get(reader.header.made_by)
    if kind is None:
        raise reader.damaged(0, f"no component is made by {reader.header.made_by[:80]!r}")
    return kind
