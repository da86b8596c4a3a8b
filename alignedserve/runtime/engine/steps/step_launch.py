"""A step that is on the compute stream, and what it will leave."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, TokenLogprob, sampled_tokens
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.streams import Event, HostEvent
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.sampling.logits_processors import LogitsChanges
from alignedserve.runtime.engine.sampling.sampler import Draw
from alignedserve.runtime.engine.steps.block_loans import Loans
from alignedserve.runtime.engine.steps.planned_step import StepBatch
from alignedserve.runtime.engine.steps.step_output import PromptLogprobs, StepTimes
from alignedserve.runtime.grammar.token_masks import StepMasks
from kernels.cpu.decode_pass import AllowedTokens

# On a CPU, masks and forward pass have the same cores: beside the pass, masks keep one of its threads from work while
# all others wait for it. Where they take longer than this, the pass begins without them.
MASKS_FIRST_S = 0.02


@dataclass(slots=True)
class StepLaunch:
    """A step on the compute stream."""

    step: StepBatch
    num_tokens: IntArray  # of each sampled row, before the step
    computed: Event = field(default_factory=HostEvent)  # its tokens are on the host then
    masks: "Future[StepMasks] | None" = None  # of its sampled rows; None: no row has a grammar
    changes: LogitsChanges | None = None  # in the logits of its sampled rows; None: there are none
    grammar_s: float = 0.0  # that the step has waited for its masks
    first_place: int = 0  # of its tokens among those that are chosen on the device
    # Of a step that was launched ahead: the places, among the tokens that the step before it chose on the device, of
    # those that are its inputs in the order of its rows; and which of its own sampled rows were asked for.
    inputs_at: IntArray | None = None
    kept: IntArray | None = None
    loans: Loans | None = None  # blocks of the engine's that it writes; None: of its sequences alone
    on_host: Tensor | None = None  # the tokens of its sampled rows, once it is computed
    takes_highest: bool = False  # the highest logits of its rows are all that is asked for
    draw: Draw | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    embeddings: dict[int, bytes] = field(default_factory=dict)  # by place among the sampled rows
    forwarded: float = 0.0  # time at which the forward pass was computed, or enqueued

    def await_masks(self, at_most_s: float | None = None) -> StepMasks | None:
        """Wait for the masks up to the limit, and note the time; None: no row has a grammar, or not yet."""
        if self.masks is None:
            return None
        began = time.perf_counter()
        wait((self.masks,), at_most_s)
        self.grammar_s += time.perf_counter() - began
        return self.masks.result() if self.masks.done() else None

    def allowed_tokens(self) -> AllowedTokens | None:
        """Return the masks, which are there, in the form that a pass takes whose rows are all sampled; None: none."""
        if self.masks is None:
            return None
        masks, places = self.masks.result(), np.full(len(self.step.rows), -1, np.int64)
        places[masks.at] = np.arange(len(masks.at))
        return AllowedTokens(torch.from_numpy(places), torch.from_numpy(masks.bits))

    def sampled(
        self, request_ids: Sequence[RequestId], token_ids: IntArray, logprobs: Mapping[int, TokenLogprob]
    ) -> list[SampledToken]:
        tokens = sampled_tokens(request_ids, token_ids.tolist())
        for index in {*logprobs, *self.embeddings} if logprobs or self.embeddings else ():
            more = logprobs.get(index), self.embeddings.get(index, b"")
            tokens[index] = SampledToken(request_ids[index], tokens[index].token_id, *more)
        return tokens

    def times(self, model: Decoder, started: float, prepared: float, *, is_ahead: bool) -> StepTimes:
        now = time.perf_counter()
        forwarded = self.forwarded if model.device.type == "cpu" else now
        return StepTimes(
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sampling_s=now - forwarded,
            attention_s=model.attention_s,
            chunk_attention_s=model.chunk_attention_s,
            padded_share=self.step.attention.padded_share,
            grammar_s=self.grammar_s,
            is_ahead=is_ahead,
        )

    @property
    def rows(self) -> IntArray:
        rows = self.step.sampled_rows
        return rows if self.kept is None else rows[self.kept]

    @property
    def places(self) -> slice:
        return slice(self.first_place, self.end_place)

    @property
    def end_place(self) -> int:
        return self.first_place + len(self.step.sampled_rows)

    @property
    def num_tokens_before(self) -> IntArray:
        return self.num_tokens if self.kept is None else self.num_tokens[self.kept]
