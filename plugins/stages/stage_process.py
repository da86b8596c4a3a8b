"""What a stage behind the first does: loads its layers, then computes parts of steps."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from alignedserve.core.errors import AlignedServeError, ProtocolError
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.ranks.frames import StartAnswer, decode, encode
from alignedserve.runtime.engine.swap_space import HostCaches, make_swap_space
from plugins.stages.stage_commands import RunPart, StageCommand
from plugins.stages.stage_engine import StageEngine
from plugins.stages.stage_spec import (
    StageStart,
    close_blocks,
    load_stage,
    make_adapters,
    make_stage_storage,
)
from plugins.stages.stage_wire import FrameKind, StageWire

logger = logging.getLogger(f"alignedserve.{__name__}")


class Inputs:
    """The commands and rows that come over one connection, each kind in its order."""

    def __init__(self, wire: StageWire) -> None:
        self._wire = wire
        self._commands: deque[list[StageCommand]] = deque()
        self._rows: deque[bytearray] = deque()

    def commands(self) -> list[StageCommand] | None:
        while not self._commands:
            if not self._take():
                return None
        return self._commands.popleft()

    def rows(self) -> bytearray | None:
        while not self._rows:
            if not self._take():
                return None
        return self._rows.popleft()

    def _take(self) -> bool:
        frame = self._wire.receive()
        if frame is None:
            return False
        if frame.kind is FrameKind.COMMANDS:
            self._commands.append(decode(bytes(frame.content), list[StageCommand]))
        elif frame.kind is FrameKind.ROWS:
            self._rows.append(frame.content)
        else:
            raise ProtocolError("a frame to a stage out of turn")
        return True


def serve_stage(commands: StageWire, results: StageWire, on_loaded: Callable[[], object] = lambda: None) -> None:
    """Load what the first frame names and compute parts until the first stage closes its connections.

    Raises OSError and ProtocolError.
    """
    first = commands.receive()
    if first is None:
        return
    if first.kind is not FrameKind.SPECIFICATION:
        raise ProtocolError("a frame to a stage out of turn")
    start = decode(bytes(first.content), StageStart)
    try:
        engine, swap_space = _make_engine(start)
        adapters = make_adapters(start.spec, start.index)
    except AlignedServeError as error:
        results.send(FrameKind.STARTED, encode(StartAnswer.failed(error)))
        return
    on_loaded()
    results.send(FrameKind.STARTED, encode(StartAnswer()))
    perform = partial(engine.perform, swap_space=swap_space, adapters=adapters)
    try:
        _follow(Inputs(commands), results, engine, perform)
    finally:
        adapters.close()


def _follow(inputs: Inputs, results: StageWire, engine: StageEngine, perform: Callable[[StageCommand], object]) -> None:
    width, dtype = engine.model.config.hidden_size, engine.model.dtype
    while (commands := inputs.commands()) is not None:
        for command in commands:
            if not isinstance(command, RunPart):
                perform(command)
                continue
            content = inputs.rows()
            if content is None:
                return
            rows = torch.frombuffer(content, dtype=dtype).view(-1, width)
            results.send(FrameKind.ROWS, bytes_of(engine.run_part(command, rows)))


def bytes_of(rows: Tensor) -> memoryview:
    if not rows.numel():
        return memoryview(b"")
    return rows.contiguous().view(torch.uint8).numpy().data.cast("B")


def _make_engine(start: StageStart) -> tuple[StageEngine, HostCaches]:
    spec = start.spec
    torch.set_num_threads(spec.num_threads)
    storage = make_stage_storage(spec, start.index, start.blocks)
    close_blocks(start.blocks)
    engine = StageEngine(model=load_stage(spec, start.index), storage=storage, options=spec.engine_options)
    engine.stage = spec.stages[start.index]
    swap_space = make_swap_space(
        storage,
        streams_of(storage.device),
        shares_blocks=spec.wants_shared_blocks and engine.can_share_blocks,
        is_int8=spec.has_int8_swaps,
        host_bytes=spec.swap_space_bytes,
    )
    return engine, swap_space
