"""A request on arrival: facts that never change; components exchange it."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.picture import Picture, PictureRun, check_pictures, with_picture_keys

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORD_TOKENS = 1 << 13  # of all bad words together
MAX_GRAMMAR_LEN = 1 << 20
PREFIX_ROOT_BYTES = 16
ADAPTER_DIGEST_BYTES = 16
MAX_ADAPTER_NAME_LEN = 200
MAX_ADAPTER_PATH_LEN = 4096
MAX_TENANT_LEN = 256
MAX_WEIGHT = 1e6
MAX_PRIORITY = 1000  # both ways


class RequestClass(enum.Enum):
    """Real-time: a person waits. Best-effort: only a deadline counts."""

    REAL_TIME = "rt"
    BEST_EFFORT = "be"


class FinishReason(enum.Enum):
    """Reason why an answer ended (OpenAI's words)."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # the gateway's word for a STOP after calls; no worker says it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. Temperature 0 is greedy; the neutral value of every other field changes nothing.

    The same `seed` and the same request give the same tokens, whatever shares the batch (design, section 5). If there
    is none, the gateway or `LLM` draws one for each request; an engine that gets none takes 0.
    Raises InvalidRequest naming the field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # no other token is chosen; empty: every token may be
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the answer must not contain
    num_logprobs: int | None = None  # None: none; 0: the chosen token's; n: those of the n likeliest as well
    num_prompt_logprobs: int | None = None  # the same, for every prompt token after the first
    wants_embedding: bool = False  # of the prompt; max_tokens is 0 then
    grammar: str = ""  # what the answer must match, in the form that llguidance reads; empty: anything

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 0, "max_tokens", "must be at least 0")
        _require(0 <= self.min_tokens <= max(self.max_tokens, 0), "min_tokens", "must be between 0 and max_tokens")
        _require(0.0 <= self.temperature <= 2.0, "temperature", "must be between 0 and 2")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(0 <= self.top_k < 1 << 31, "top_k", "must be at least 0")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        _require(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "must be above 0 and at most 10")
        _require(self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "seed", "must fit 64 bits")
        _require(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", "too many entries")
        _require(len(self.logit_bias) <= MAX_LOGIT_BIAS_ENTRIES, "logit_bias", "too many entries")
        _require(all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias), "logit_bias", "must lie in -100..100")
        _require(len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids", "too many entries")
        _require(all(self.bad_words), "bad_words", "must not be empty")
        num_bad = sum(len(word) for word in self.bad_words)
        _require(num_bad <= MAX_BAD_WORD_TOKENS, "bad_words", "are too long together")
        _require(len(self.grammar) <= MAX_GRAMMAR_LEN, "grammar", "is too long")
        _require(not self.wants_embedding or self.max_tokens == 0, "max_tokens", "must be 0 for an embedding")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}")

    @property
    def has_penalties(self) -> bool:
        """True if the tokens seen so far change the logits by penalties."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def excludes_tokens(self) -> bool:
        """True if some tokens are never chosen, a grammar's aside."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def changes_logits(self) -> bool:
        """True if the logits are changed at every step, by anything but a grammar."""
        return self.has_penalties or bool(self.logit_bias or self.allowed_token_ids or self.bad_words)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of one request; None: no such objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None  # from arrival to the last token

    def completed_by(self, default: "Slo") -> "Slo":
        """Return these objectives with the default ones where none is named; a deadline stands for all of them."""
        if self.deadline_s is not None:
            return self
        return Slo(
            ttft_s=default.ttft_s if self.ttft_s is None else self.ttft_s,
            tpot_s=default.tpot_s if self.tpot_s is None else self.tpot_s,
        )

    @property
    def targets(self) -> tuple[tuple[str, float], ...]:
        """The objectives that are set, by the names that metrics and answers give them."""
        named = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("deadline", self.deadline_s))
        return tuple((name, target_s) for name, target_s in named if target_s is not None)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that a request is computed with. Two are the same if their digests are, whatever their names."""

    name: str  # as clients call it
    path: str  # of its folder, the same on every host that computes with it
    digest: bytes  # of its files' contents

    def __post_init__(self) -> None:
        _require(0 < len(self.name) <= MAX_ADAPTER_NAME_LEN, "model", "has too long a name")
        _require(0 < len(self.path) <= MAX_ADAPTER_PATH_LEN, "lora_path", "is too long")
        _require(len(self.digest) == ADAPTER_DIGEST_BYTES, "digest", "is not one of an adapter")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived. Each component keeps its progress in a record of its own."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    reply_to: str  # address, or name, of the gateway that streams the tokens
    arrival_s: float  # seconds on the gateway's monotonic clock, which all processes of a host share
    request_class: RequestClass = RequestClass.REAL_TIME
    slo: Slo = Slo()
    priority: int = 0  # smaller goes first among equals
    # The root of its block hashes (prefix_cache/block_hashes.py); empty: it neither reads nor leaves anything cached.
    prefix_root: bytes = b""
    second_text_at: int = 0  # of a pair of texts: the first token of the second; 0: encoders take the prompt as one
    adapter: LoraAdapter | None = None  # None: the model alone
    tenant: str = ""  # the client that it counts for where several share (core/fair_shares.py)
    weight: float = 1.0  # of that client's share
    pictures: tuple[Picture, ...] = ()  # in the order of their places in the prompt
    whole_runs: tuple[PictureRun, ...] = ()  # of tokens that read one another both ways: those of some pictures
    num_encoder_tokens: int = 0  # what an encoder's passes over its pictures cost, in prompt tokens

    def __post_init__(self) -> None:
        _require(len(self.prompt_token_ids) > 0, "prompt", "must hold at least one token")
        _require(0 <= self.second_text_at < max(self.prompt_len, 1), "second_text_at", "must be a place in the prompt")
        _require(len(self.prefix_root) in (0, PREFIX_ROOT_BYTES), "prefix_root", "must be a block hash, or empty")
        _require(len(self.tenant) <= MAX_TENANT_LEN, "tenant", "has too long a name")
        _require(0 < self.weight <= MAX_WEIGHT, "weight", f"must be above 0 and at most {MAX_WEIGHT:g}")
        if self.pictures:
            check_pictures(self.pictures, self.prompt_len)

    @property
    def is_real_time(self) -> bool:
        """Whether a client reads its tokens as they come."""
        return self.request_class is RequestClass.REAL_TIME

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def cache_keys(self) -> tuple[int, ...]:
        """The prompt for the prefix cache: its tokens, with keys in place of picture tokens. Worked out each time."""
        return with_picture_keys(self.prompt_token_ids, self.pictures)

    @property
    def max_context_len(self) -> int:
        """Maximum number of tokens that the request may hold."""
        return self.prompt_len + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of the likeliest tokens at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first
    rank: int = 0  # its place in the whole vocabulary, 1: the likeliest; 0: not known


class SampledToken(NamedTuple):
    """One new token of one request. A named tuple: one is made per request and iteration, at half the cost."""

    request_id: RequestId
    token_id: int
    logprob: TokenLogprob | None = None
    embedding: bytes = b""  # of the prompt in its place, where that was asked for: float32, little-endian


_token_of: Callable[[Iterable[Any]], SampledToken] = partial(tuple.__new__, SampledToken)


def sampled_tokens(request_ids: Sequence[RequestId], token_ids: Sequence[int]) -> list[SampledToken]:
    """Return a token of each request, and nothing more: as by the constructor, in half the time."""
    fields = zip(request_ids, token_ids, repeat(None), repeat(b""), strict=False)
    return list(map(_token_of, fields))


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} {problem}.", param=field)
