"""The process of a rank beside the first: python -m .follower_process SOCKET COPIES LIFELINE, started by RankGroup.

The process ends with its parent, by the lifeline, a pipe."""

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import AlignedServeError
from alignedserve.process.connected_process import end_with_parent
from alignedserve.process.heap import freeze_heap
from alignedserve.runtime.attention.sequence_table import NewSequence
from alignedserve.runtime.device.accelerator import use_device
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.ranks.frames import StartAnswer, decode, encode, receive_frame, send_frame
from alignedserve.runtime.engine.ranks.rank_commands import (
    AddSequence,
    AppendBlocks,
    Command,
    CopyBlocks,
    PerformSwaps,
    RemoveSequence,
    ReplaceBlock,
    RunStep,
    SetTokens,
    WriteCopies,
)
from alignedserve.runtime.engine.ranks.rank_group import FollowerCopies, FrameCount
from alignedserve.runtime.engine.ranks.rank_spec import RankStart, join, load_shard, make_adapters, make_storage
from alignedserve.runtime.engine.steps.step import NO_TOKEN, StepLaunch
from alignedserve.runtime.engine.swap_space import HostCaches, make_swap_space
from alignedserve.runtime.lora.adapter_cache import SequenceAdapters

logger = logging.getLogger(__name__)


class FollowerEngine(Engine):
    """Performs the commands of rank 0, whose engine was made with the same sizes."""

    _launched: StepLaunch | None = None
    _read: Tensor | None = None  # content of the blocks that are to be copied

    def perform(self, command: Command, swap_space: HostCaches, adapters: SequenceAdapters | None = None) -> None:
        """Perform one command; `swap_space`: of this engine's storage; `adapters`: None: no sequence has one. Raises
        AdapterError where rank 0 has an adapter that this rank cannot load."""
        match command:
            case RunStep():
                self._run(command)
            case SetTokens(token_ids):
                self._set_tokens(token_ids)
            case AddSequence():
                self.add_sequence(_sequence_of(command, adapters))
            case AppendBlocks(request_id, block_ids):
                self.append_blocks(request_id, block_ids)
            case RemoveSequence(request_id):
                self.remove_sequence(request_id)
                if adapters is not None:
                    adapters.remove(request_id)
            case ReplaceBlock(request_id, place, block_id):
                self.replace_block(request_id, place, block_id)
            case CopyBlocks(sources):
                self._read = self.read_blocks(sources)
            case WriteCopies(targets):
                assert self._read is not None, "nothing was read"
                self.write_blocks(targets, self._read)
                self._read = None
            case PerformSwaps(swaps):
                swap_space.perform(swaps)

    @torch.inference_mode()
    def _run(self, command: RunStep) -> None:
        for request_id, token_ids in command.forced:
            table, row = self._table, self._table.row(request_id)
            count = int(table.num_tokens[row])
            table.tokens[row, count : count + len(token_ids)] = token_ids
            table.num_tokens[row] = count + len(token_ids)
        step = self._build(command.slices, dict(command.forced))
        launch = StepLaunch(step, self._table.num_tokens[step.sampled_rows], takes_highest=command.takes_highest)
        self._enqueue(launch)
        self._next.plan([launch])
        launch.computed.synchronize()
        self._launched = launch

    @override
    def _compute_step(self, launch: StepLaunch) -> None:
        if self._passes.highest(launch) is not None:
            return
        hidden, _ = self._passes.logits(launch.step)
        self._prompts.make_passes(launch.step, hidden)

    def _set_tokens(self, token_ids: Sequence[int]) -> None:
        assert self._launched is not None, "tokens of no step"
        tokens, launched = np.array(token_ids, np.int64), self._launched
        if not self._table.note_tokens(launched.rows, launched.num_tokens_before, tokens, tokens != NO_TOKEN):
            self._next.forget()
        self._launched = None


def _sequence_of(command: AddSequence, adapters: SequenceAdapters | None) -> NewSequence:
    adapter = None
    if command.adapter is not None:
        assert adapters is not None, "an adapter for a rank that loads none"
        adapter = adapters.acquire(command.request_id, command.adapter)
    return command.sequence(adapter)


def main(socket_descriptor: int, copies_descriptor: int, lifeline: int) -> int:
    end_with_parent(lifeline)
    connection = socket.socket(fileno=socket_descriptor)
    first = receive_frame(connection)
    if first is None:
        return 0
    start = decode(first, RankStart)
    try:
        engine, swap_space = _make_engine(start)
        adapters = make_adapters(start.spec, start.rank)
    except AlignedServeError as error:
        with contextlib.suppress(OSError):  # the first rank has failed by itself
            send_frame(connection, encode(StartAnswer.failed(error)))
        return 1
    send_frame(connection, encode(StartAnswer()))
    performed = FrameCount()
    copies = FollowerCopies(socket.socket(fileno=copies_descriptor), engine.storage, performed)
    threading.Thread(target=copies.follow, name="copies", daemon=True).start()
    engine.record_graphs(has_adapters=start.spec.lora.is_enabled)
    freeze_heap()
    while (payload := receive_frame(connection)) is not None:
        for command in decode(payload, list[Command]):
            engine.perform(command, swap_space, adapters)
        performed.add()
    return 0


def _make_engine(start: RankStart) -> tuple[FollowerEngine, HostCaches]:
    spec, rank = start.spec, start.rank
    torch.set_num_threads(spec.num_threads)
    device = spec.device(rank)
    use_device(device)
    collectives = join(spec, rank, start.meeting)
    storage = make_storage(spec, rank, start.meeting)
    for descriptor in start.meeting.descriptors:
        os.close(descriptor)
    streams = streams_of(device)
    engine = FollowerEngine(
        model=load_shard(spec, collectives), storage=storage, options=spec.engine_options, streams=streams
    )
    swap_space = make_swap_space(
        storage,
        streams,
        shares_blocks=spec.wants_shared_blocks and engine.can_share_blocks,
        is_int8=spec.has_int8_swaps,
        host_bytes=spec.swap_space_bytes,
    )
    return engine, swap_space


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
