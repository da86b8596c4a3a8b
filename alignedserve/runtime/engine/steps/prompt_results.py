"""What a step tells of prompts beside the tokens after them: their embeddings, log-probabilities of their tokens."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.request import TokenLogprob
from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.sampling.sampler import logprob_entries
from alignedserve.runtime.engine.steps.planned_step import StepBatch
from alignedserve.runtime.engine.steps.step_output import PromptLogprobs

# Logits of this many prompt tokens are held at a time for prompt logprobs.
_ROWS = 64


class PromptResults:
    """Computes them from a step's last hidden vectors [tokens, hidden_size]."""

    def __init__(self, model: Decoder, table: SequenceTable) -> None:
        self._model, self._table = model, table

    def embeddings(self, step: StepBatch, hidden: Tensor) -> dict[int, bytes]:
        if not len(step.wants_embeddings):
            return {}
        places = step.wants_embeddings if step.last is not None else step.sampled_at[step.wants_embeddings]
        (at,) = to_device([places], hidden.device)
        vectors = self._model.outputs(hidden[at]).float().cpu().numpy()
        return {int(place): vector.tobytes() for place, vector in zip(step.wants_embeddings, vectors, strict=True)}

    def logprobs(self, step: StepBatch, hidden: Tensor) -> list[PromptLogprobs]:
        return [self._logprobs(step, index, hidden) for index in step.wants_prompt_logprobs]

    def make_passes(self, step: StepBatch, hidden: Tensor) -> None:
        for index in step.wants_prompt_logprobs:
            for _ in self._logits(step, index, hidden):
                pass

    def _logprobs(self, step: StepBatch, index: int, hidden: Tensor) -> PromptLogprobs:
        row = int(step.rows[index])
        sequence = self._table.sequence(row)
        first, count = self._scored_tokens(step, index)
        targets = torch.from_numpy(self._table.tokens[row, first : first + count].astype(np.int64)).to(hidden.device)
        num_top = sequence.sampling.num_prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        for logits in self._logits(step, index, hidden):
            start = len(entries)
            stop = start + len(logits)
            entries += logprob_entries(logits.float(), targets[start:stop], [num_top] * len(logits))
            self._model.give_way()  # a chunk takes as long here as in the layers
        return PromptLogprobs(sequence.request_id, first, tuple(entries))

    def _logits(self, step: StepBatch, index: int, hidden: Tensor) -> Iterator[Tensor]:
        first_row, (_, count) = int(step.first_rows[index]), self._scored_tokens(step, index)
        for start in range(0, count, _ROWS):
            yield self._model.logits(hidden[first_row + start : first_row + min(start + _ROWS, count)])

    def _scored_tokens(self, step: StepBatch, index: int) -> tuple[int, int]:
        first = int(step.positions[int(step.first_rows[index])]) + 1
        last_computed = first + int(step.counts[index]) - 1
        return first, min(last_computed + 1, self._table.sequence(int(step.rows[index])).prompt_len) - first
