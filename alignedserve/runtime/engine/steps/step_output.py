"""The input and output of one step of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, TokenLogprob

Slices = Sequence[tuple[RequestId, int]]  # `StepSlice`s, or equal tuples
Forced = dict[RequestId, tuple[int, ...]]  # tokens that a grammar leaves no choice of, by sequence


class StepSlice(NamedTuple):
    """Work of one sequence in one step: compute its next `num_tokens` known tokens."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens."""

    request_id: RequestId
    first_position: int  # of the prompt token that entries[0] is about; 1 or more
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The parts of one step's time, in seconds."""

    prepare_s: float
    forward_s: float  # the pass and its logits
    sampling_s: float  # and the log-probabilities of prompt tokens
    attention_s: float  # of the pass, as Decoder.attention_s
    chunk_attention_s: float  # likewise
    padded_share: float  # of attention_s, see StepAttention
    grammar_s: float = 0.0  # of all parts: waiting for masks
    is_ahead: bool = False  # its decodes were launched before the tokens of the step before were known


NO_TIMES = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step."""

    # Of every sequence whose slice reached its last known token, in any order; before it those that were forced.
    sampled: list[SampledToken]
    failed: list[RequestId]  # no token: their logits were not numbers, or see `reasons`; remove them
    reasons: dict[RequestId, str]  # of those that failed: why no token can follow under what they ask for
    prompt_logprobs: list[PromptLogprobs]
    times: StepTimes
    forced: tuple[tuple[RequestId, int], ...] = ()  # how many tokens of a sequence in `sampled` its grammar forced
