"""Workloads of the engine alone: groups of requests, by lengths or by name, all there from the start."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ConfigError

_MAX_REQUESTS = 1_000_000

NAMED = {
    "w1": "64x32:64",  # short answers to short prompts: products of 64 rows
    "w2": "60x32:64,4x1500:64",  # a few long contexts among short ones
    "w3": "8x1024:1",  # prompts alone
    "one": "1x32:128",  # one request alone: reading the weights
}
# Lengths as a server sees them.
W4 = "w4"
_W4_REQUESTS = 128
_W4_PROMPT_MEDIAN, _W4_PROMPT_P95, _W4_PROMPT_LIMIT = 150, 1400, 1792
_W4_OUTPUT_MEDIAN, _W4_OUTPUT_LIMIT = 60, 256
_P95_DEVIATIONS = 1.645  # of a normal distribution


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of the same lengths."""

    num_requests: int
    prompt_len: int
    output_len: int


def parse_workload(text: str, seed: int = 0) -> tuple[RequestGroup, ...]:
    """Parse a workload: `64x32:64` is 64 requests of 32 prompt and 64 output tokens; a comma separates groups.

    Or a name: w1, w2, w3, w4 (whose lengths are drawn by the seed) or one. Raises ConfigError.
    """
    if text == W4:
        return _log_normal_lengths(seed)
    return tuple(_parse_group(part.strip()) for part in NAMED.get(text, text).split(","))


def _log_normal_lengths(seed: int) -> tuple[RequestGroup, ...]:
    generator = np.random.default_rng(seed)
    prompts = _log_normal(generator, _W4_PROMPT_MEDIAN, _W4_PROMPT_P95).clip(4, _W4_PROMPT_LIMIT)
    outputs = _log_normal(generator, _W4_OUTPUT_MEDIAN, _W4_OUTPUT_LIMIT).clip(1, _W4_OUTPUT_LIMIT)
    lengths = zip(prompts.round().astype(int).tolist(), outputs.round().astype(int).tolist(), strict=True)
    return tuple(RequestGroup(1, prompt_len, output_len) for prompt_len, output_len in lengths)


def _log_normal(generator: np.random.Generator, median: float, p95: float) -> npt.NDArray[np.float64]:
    return generator.lognormal(math.log(median), math.log(p95 / median) / _P95_DEVIATIONS, _W4_REQUESTS)


def _parse_group(text: str) -> RequestGroup:
    count, separator, lengths = text.partition("x")
    prompt_len, colon, output_len = lengths.partition(":")
    numbers = (count, prompt_len, output_len)
    is_valid = separator and colon and all(number.isascii() and number.isdigit() for number in numbers)
    if not is_valid or not all(1 <= int(number) <= _MAX_REQUESTS for number in numbers):
        names = ", ".join((*NAMED, W4))
        raise ConfigError(
            f"workload {text!r} must read like 64x32:64 (requests x prompt tokens : output tokens) or be of {names}."
        )
    return RequestGroup(*(int(number) for number in numbers))
