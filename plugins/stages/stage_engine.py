"""The engine of a stage behind the first: its layers, for the parts of steps that it is told of."""

import numpy as np
import torch
from torch import Tensor

from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.ranks.rank_commands import (
    AddSequence,
    AppendBlocks,
    CopyBlocks,
    PerformSwaps,
    RemoveSequence,
    ReplaceBlock,
    WriteCopies,
)
from alignedserve.runtime.engine.swap_space import HostCaches
from alignedserve.runtime.lora.adapter_cache import SequenceAdapters
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from plugins.stages.stage_commands import LendBlocks, RunPart, SettleLoans, StageCommand


class StageEngine(Engine):
    """Performs the commands of the first stage, whose engine was made with the same sizes."""

    stage: LayerStage
    _read: Tensor | None = None  # content of the blocks that are to be copied

    def perform(self, command: StageCommand, swap_space: HostCaches, adapters: SequenceAdapters) -> None:
        """Perform one command, but RunPart; `swap_space`: of this engine's storage; `adapters`: of its layers.

        Raises AdapterError where the first stage has an adapter that this one cannot load.
        """
        match command:
            case AddSequence():
                adapter = command.adapter
                self.add_sequence(
                    command.sequence(None if adapter is None else adapters.acquire(command.request_id, adapter))
                )
            case AppendBlocks(request_id, block_ids):
                self.append_blocks(request_id, block_ids)
            case RemoveSequence(request_id):
                self.remove_sequence(request_id)
                adapters.remove(request_id)
            case ReplaceBlock(request_id, index, block_id):
                self._table.block_tables[self._table.row(request_id), index] = block_id
            case CopyBlocks(sources):
                self._read = self.read_blocks(sources)
            case WriteCopies(targets):
                assert self._read is not None, "nothing was read"
                self.write_blocks(targets, self._read)
                self._read = None
            case PerformSwaps(swaps):
                swap_space.perform(swaps)
            case LendBlocks(loans):
                for request_id, index, block_id in loans:
                    self._table.block_tables[self._table.row(request_id), index] = block_id
            case SettleLoans(sources, targets):
                self.storage.copy_first_slots(torch.tensor(sources), torch.tensor(targets))
            case RunPart():
                raise AssertionError("a part without its rows")

    @torch.inference_mode()
    def run_part(self, part: RunPart, inputs: Tensor) -> Tensor:
        """Compute inputs [tokens, hidden_size], which may change -> hidden vectors: of all tokens for a stage in
        between; of the last those whose logits are needed, unless the part wants all."""
        table = self._table
        request_ids = [piece.request_id for piece in part.slices]
        rows = table.rows(request_ids)
        table.num_computed[rows] = np.array([piece.num_computed for piece in part.slices])
        table.num_tokens[rows] = np.array([piece.num_known for piece in part.slices])
        counts = [piece.num_tokens for piece in part.slices]
        # Unchecked where all decode: a block may be lent.
        step = self._builder.build_decodes(rows) if max(counts) == 1 else self._builder.build(request_ids, counts)
        is_last = self.stage.is_last
        batch = (step if is_last else step._replace(last=None)).forward_batch(self.storage.device)
        hidden = self.model.through_layers(inputs, batch, self.storage)
        if not is_last or part.wants_all or len(step.sampled_at) == len(hidden):
            return hidden
        if not len(step.sampled_at):
            return hidden[:0]
        return hidden.index_select(0, torch.from_numpy(step.sampled_at))
