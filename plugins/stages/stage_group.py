"""The stages of a worker behind the first, which is this process: commands to them, and rows that come back.

Rows go from stage to stage through this process, on threads of their own: from one behind the first to the next as
they come, and from the last one to whoever waits for them.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import ProtocolError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.streams import Event
from alignedserve.runtime.engine.ranks.frames import StartAnswer, decode
from alignedserve.runtime.engine.ranks.rank_group import MirroredRanks
from alignedserve.runtime.engine.steps.step import Forced, Slices
from kernels.cpu.rank_exchange import ExchangeBroken
from plugins.stages.no_copies import NoCopies
from plugins.stages.stage_commands import LendBlocks, PartSlice, RunPart, SettleLoans
from plugins.stages.stage_process import bytes_of
from plugins.stages.stage_spec import StageSpec
from plugins.stages.stage_wire import FrameKind, StageWire

logger = logging.getLogger(f"alignedserve.{__name__}")

_LOST = "a stage of this worker has ended, or has not answered in time"
_TIMEOUT_S = 60.0  # for which rows are waited for before a stage counts as hung


class StageLink(Protocol):
    """The two connections to a stage, and its process if this process started it."""

    commands: StageWire
    results: StageWire

    def kill(self) -> None:
        """End the stage at once. From any thread."""

    def close(self) -> None:
        """End the stage and wait for it."""


class _Received:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: dict[int, bytearray] = {}
        self._count = 0
        self._is_broken = False

    @property
    def count(self) -> int:
        return self._count

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    def add(self, rows: bytearray) -> None:
        with self._changed:
            self._count += 1
            self._rows[self._count] = rows
            self._changed.notify_all()

    def break_off(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def wait(self, number: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_broken or self._count >= number, timeout_s)
            if self._count < number:
                raise ExchangeBroken(_LOST)

    def take(self, number: int) -> bytearray:
        with self._changed:
            for older in [row for row in self._rows if row < number]:
                del self._rows[older]
            return self._rows.pop(number)


class PartEvent:
    """The end of a part on all stages; see Event."""

    def __init__(self, received: _Received, number: int) -> None:
        self._received, self._number = received, number

    def is_done(self) -> bool:
        return self._received.count >= self._number

    def synchronize(self) -> None:
        self._received.wait(self._number, _TIMEOUT_S)


class StageGroup(MirroredRanks):
    """A stage that ends breaks it: every later step fails, and the worker with it."""

    def __init__(self, spec: StageSpec, links: Sequence[StageLink]) -> None:
        """`links` to the stages behind the first, in order, whose loading goes on: see `wait`."""
        super().__init__()
        self._links = links
        self.size = spec.size
        self.copies = NoCopies(spec.size)  # where each stage has its own blocks
        self._width, self._dtype = spec.model.config.hidden_size, torch_dtype(spec.model.dtype)
        self._received = _Received()
        self._started: dict[int, StartAnswer] = {}
        self._heard = threading.Condition()
        self._is_closed = False
        self._num_sent = 0
        self._threads = [
            threading.Thread(target=self._receive, args=(index,), name=f"stage {index + 1}", daemon=True)
            for index in range(len(links))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        with self._heard:
            self._heard.wait_for(lambda: self._received.is_broken or len(self._started) == len(self._links))
            answers: Mapping[int, StartAnswer] = dict(self._started)
        for answer in sorted(answers):
            answers[answer].raise_error()
        if len(answers) < len(self._links):
            raise ExchangeBroken("a stage of this worker has ended while it was loading")

    # --- for the compute thread

    def run_part(self, slices: Sequence[PartSlice], *, wants_all: bool) -> None:
        self._told.append(RunPart(tuple(slices), wants_all))

    def lend_blocks(self, loans: Sequence[tuple[RequestId, int, BlockId]]) -> None:
        """Put blocks of the engine's own behind those of sequences: sequence, place in its table, block."""
        if loans:
            self._told.append(LendBlocks(tuple(loans)))

    def settle_loans(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy the first slots of lent blocks into those that have taken their places."""
        self._told.append(SettleLoans(tuple(sources), tuple(targets)))

    def send_rows(self, rows: Tensor) -> int:
        """Send what was told and the rows [tokens, hidden_size] of a part; return its number. Raises ExchangeBroken."""
        self.flush()
        self._put(0, FrameKind.ROWS, bytes_of(rows))
        self._num_sent += 1
        return self._num_sent

    def rows_of(self, number: int) -> Tensor:
        """Wait for the last stage's rows of a part; those before are dropped. Raises ExchangeBroken."""
        self._received.wait(number, _TIMEOUT_S)
        content = self._received.take(number)
        if not content:
            return torch.empty((0, self._width), dtype=self._dtype)
        return torch.frombuffer(content, dtype=self._dtype).view(-1, self._width)

    def event_of(self, number: int) -> PartEvent:
        return PartEvent(self._received, number)

    def settle(self) -> None:
        """Wait until all stages have done what they were sent. Raises ExchangeBroken."""
        self._received.wait(self._num_sent, _TIMEOUT_S)

    @override
    def wait_for(self, event: Event) -> None:
        event.synchronize()

    @override
    def run_step(self, slices: Slices, forced: Forced, *, takes_highest: bool) -> None:
        raise AssertionError("a step that is not in parts")

    @override
    def set_tokens(self, token_ids: IntArray) -> None:
        """Stages behind the first know no tokens."""

    @override
    def flush(self) -> None:
        if self._told:
            super().flush()

    @override
    def _send(self, payload: bytes) -> None:
        for index in range(len(self._links)):
            self._put(index, FrameKind.COMMANDS, payload)

    # --- the end

    @override
    def kill(self) -> None:
        self._received.break_off()
        for link in self._links:
            link.kill()

    @override
    def close(self) -> None:
        self._is_closed = True
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()

    # --- on the threads

    def _put(self, index: int, kind: FrameKind, content: "bytes | bytearray | memoryview") -> None:
        try:
            self._links[index].commands.send(kind, content)
        except OSError as error:
            raise ExchangeBroken(f"stage {index + 1} of this worker has ended") from error

    def _receive(self, index: int) -> None:
        wire, is_last = self._links[index].results, index == len(self._links) - 1
        try:
            while (frame := wire.receive()) is not None:
                if frame.kind is FrameKind.STARTED:
                    self._hear(index, decode(bytes(frame.content), StartAnswer))
                elif frame.kind is not FrameKind.ROWS:
                    raise ProtocolError("a frame of a stage out of turn")
                elif is_last:
                    self._received.add(frame.content)
                else:
                    self._put(index + 1, FrameKind.ROWS, frame.content)
        except (OSError, ExchangeBroken, ProtocolError) as error:
            logger.info("stage %d of this worker: %s", index + 1, error)
        if not self._is_closed:
            logger.error("stage %d of this worker has ended", index + 1)
        self._received.break_off()
        with self._heard:
            self._heard.notify_all()

    def _hear(self, index: int, started: StartAnswer) -> None:
        with self._heard:
            self._started[index] = started
            self._heard.notify_all()
