"""What an engine is asked to compute in one step, and what comes of it."""

from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, TokenLogprob


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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step."""

    sampled: list[SampledToken]  # of every sequence whose slice reached its last known token, in any order
    failed: list[RequestId]  # no token: their logits were not numbers, or see `reasons`; remove them
    reasons: dict[RequestId, str]  # of those that failed: why no token can follow under their grammar
    prompt_logprobs: list[PromptLogprobs]
    times: StepTimes
