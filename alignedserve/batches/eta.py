"""When a batch will have ended, and whether that is in time.

Work is counted in tokens, prompt and answer together. Before it runs, a line is thought to have as many prompt tokens
as its bytes say and an answer as long as answers of lines have been; as soon as its own lines end, theirs count. What
stands before a batch is what is left of all batches that end before it. The rate is what batches really got lately,
beside the real-time traffic of that time. Before any line has run it is an assumption: what the configuration says, or
what the workers do while they are busy where that is more, times the share of their time that others leave. Example:
500 tokens/s assumed, workers that made 9 000 tokens in 30 s and had nothing to do for 30 s: 250.

    expected finish = now + (tokens before + tokens of its own) / (tokens per second)

It fits when it would even at 0.8 of the rate; it cannot fit when it would not even at 1.25 of it, and T is that finish;
otherwise it is at risk. Example: 2 000 lines of 150 tokens, nothing before, 100 tokens/s: 3 000 s. A window of 1 h
(3 600 s) is at risk, as at 80 tokens/s it would take 3 750 s; two hours fit; half an hour cannot, before T = 2 400 s.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from alignedserve.batches.records import BatchRecord, Kept, Progress, Quote, Risk

_SLOWER, _FASTER = 0.8, 1.25
_BYTES_PER_TOKEN = 4.0
_LINE_FRAME_BYTES = 120  # of a line beside its text
_FIRST_OUTPUT_LEN = 64.0  # an answer's tokens, before one was seen
_WINDOW = 256.0  # lines that weigh in a running mean
_RATE_WINDOW_S = 60.0
_TRUST_LINES = 16.0  # of a batch: with as many ended, half of what is expected of the others comes from them


class Capacity(Kept, frozen=True):
    """What lines are like and how fast they go, as the driver has learned. Kept in the store: it outlives restarts."""

    tokens_per_s: float
    is_measured: bool = False
    output_len: float = _FIRST_OUTPUT_LEN  # mean of lines that ended
    bytes_per_token: float = _BYTES_PER_TOKEN

    def with_line(self, num_bytes: int, input_tokens: int, output_tokens: int) -> "Capacity":
        """Learn from a line that ended with an answer."""
        per_token = max(0.5, (num_bytes - _LINE_FRAME_BYTES) / max(input_tokens, 1))
        return msgspec.structs.replace(
            self,
            output_len=self.output_len + (output_tokens - self.output_len) / _WINDOW,
            bytes_per_token=self.bytes_per_token + (per_token - self.bytes_per_token) / _WINDOW,
        )

    def with_rate(self, num_tokens: int, seconds: float) -> "Capacity":
        """Learn from a time in which lines ran throughout."""
        rate = num_tokens / seconds
        if not self.is_measured:
            return msgspec.structs.replace(self, tokens_per_s=max(0.1, rate), is_measured=True)
        weight = min(1.0, seconds / _RATE_WINDOW_S)
        return msgspec.structs.replace(
            self, tokens_per_s=max(0.1, self.tokens_per_s + (rate - self.tokens_per_s) * weight)
        )

    def line_tokens(self, num_bytes: float) -> float:
        """Expected tokens of a line of so many bytes, none of whose siblings has ended."""
        return max(1.0, (num_bytes - _LINE_FRAME_BYTES) / self.bytes_per_token) + self.output_len


def assumed_rate(configured: float, num_tokens: int, wall_s: float, idle_s: float) -> float:
    """Tokens per second that are left for batches, from what the workers did in some time."""
    if wall_s <= 0.0:
        return configured
    busy_s = max(wall_s - idle_s, 0.0)
    fastest = max(configured, num_tokens / busy_s if busy_s > 0.0 else 0.0)
    return max(0.1, fastest * min(1.0, idle_s / wall_s))


class Workload(NamedTuple):
    """What is left of a batch."""

    expires_s: float
    num_tokens: float  # expected


def workload(record: BatchRecord, progress: Progress, capacity: Capacity) -> Workload:
    """What is left of this batch: by its own lines as far as they have ended, by others until then."""
    num_lines = record.num_lines or record.input_lines
    num_ended = progress.counts.num_ended
    per_line = capacity.line_tokens(record.input_bytes / max(num_lines, 1))
    if num_ended:
        seen = (progress.usage.input_tokens + progress.usage.output_tokens) / num_ended
        per_line += (seen - per_line) * num_ended / (num_ended + _TRUST_LINES)
    return Workload(record.expires_s, max(0, num_lines - num_ended) * per_line)


def quote(own: Workload, others: Iterable[Workload], capacity: Capacity, now: float) -> Quote:
    """When this batch ends beside the others, all of them run by least slack."""
    before = sum(other.num_tokens for other in others if other.expires_s <= own.expires_s)
    expected_s = (before + own.num_tokens) / capacity.tokens_per_s
    if now + expected_s / _SLOWER <= own.expires_s:
        risk, finish_s = Risk.FITS, now + expected_s
    elif now + expected_s / _FASTER > own.expires_s:
        risk, finish_s = Risk.CANNOT_FIT, now + expected_s / _FASTER
    else:
        risk, finish_s = Risk.AT_RISK, now + expected_s
    return Quote(risk=risk, finish_s=finish_s, is_measured=capacity.is_measured, quoted_s=now)
