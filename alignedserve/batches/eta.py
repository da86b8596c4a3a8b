"""Estimates of when a batch ends, and whether that is within its window.

Work is counted in tokens, prompt and output together. Before it runs, a line counts as many prompt tokens as its bytes
suggest and as many output tokens as lines had on average; once lines of the same batch have ended, their lengths count.
The work before a batch is what is left of all batches of its model whose window ends earlier. The rate is the recent
throughput of that model's batches, beside all other traffic of that time; each model has its own. A batch whose lines
name several models ends with the last of them. Before any line has run it is assumed: the larger of the configured
rate and the workers' rate while busy, times the share of their time that other requests leave. Example: 500 tokens/s
assumed, workers that generated 9 000 tokens in 30 s and were idle for 30 s: 250.

    expected finish = now + (tokens before + tokens of its own) / (tokens per second), of the slowest of its models

A batch fits if it ends in time even at 0.8 of the rate; it cannot fit if it does not even at 1.25 of the rate, and then
that finish T is reported; otherwise it is at risk. Example: 2 000 lines of 150 tokens, nothing before, 100 tokens/s:
3 000 s. A window of 1 h (3 600 s) is at risk, as at 80 tokens/s it takes 3 750 s; two hours fit; half an hour cannot
fit, T = 2 400 s.

Only time in which lines may start counts: with hours of 22:00 to 06:00, an hour of work that is quoted at noon ends at
23:00. Paused batches do not count as ahead, nor do batches of the same owner with a larger priority number. Where a
batch does not surely fit, the end of the nearest window that would is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from alignedserve.batches.hours import ALWAYS, Schedule, schedule_of
from alignedserve.batches.line_scheduling import ModelShares
from alignedserve.batches.records import BatchRecord, Eta, Progress, Risk, StoredRecord
from alignedserve.core.errors import InvalidRequest

_SLOWER, _FASTER = 0.8, 1.25
_BYTES_PER_TOKEN = 4.0
_LINE_FRAME_BYTES = 120  # of a line beside its text
_FIRST_OUTPUT_LEN = 64.0  # output tokens of a line, before one has ended
_WINDOW = 256.0  # lines that weigh in a running mean
_RATE_WINDOW_S = 60.0
_TRUST_LINES = 16.0  # with this many ended, a batch's own lines weigh half in the estimate of the others


class ThroughputEstimate(StoredRecord, frozen=True):
    """Throughput and mean lengths of lines as measured by the driver; stored, so that restarts keep it."""

    tokens_per_s: float
    is_measured: bool = False
    output_len: float = _FIRST_OUTPUT_LEN  # mean of lines that ended
    bytes_per_token: float = _BYTES_PER_TOKEN

    def with_line(self, num_bytes: int, input_tokens: int, output_tokens: int) -> "ThroughputEstimate":
        per_token = max(0.5, (num_bytes - _LINE_FRAME_BYTES) / max(input_tokens, 1))
        return msgspec.structs.replace(
            self,
            output_len=self.output_len + (output_tokens - self.output_len) / _WINDOW,
            bytes_per_token=self.bytes_per_token + (per_token - self.bytes_per_token) / _WINDOW,
        )

    def with_rate(self, num_tokens: int, seconds: float) -> "ThroughputEstimate":
        rate = num_tokens / seconds
        if not self.is_measured:
            return msgspec.structs.replace(self, tokens_per_s=max(0.1, rate), is_measured=True)
        weight = min(1.0, seconds / _RATE_WINDOW_S)
        return msgspec.structs.replace(
            self, tokens_per_s=max(0.1, self.tokens_per_s + (rate - self.tokens_per_s) * weight)
        )

    def line_tokens(self, num_bytes: float) -> float:
        """Estimate the tokens of a line of this size, before any line of its batch has ended."""
        return max(1.0, (num_bytes - _LINE_FRAME_BYTES) / self.bytes_per_token) + self.output_len


def assumed_rate(configured: float, num_tokens: float, wall_s: float, idle_s: float) -> float:
    """Return the tokens per second that are left for batches, from the workers' totals over some time."""
    if wall_s <= 0.0:
        return configured
    busy_s = max(wall_s - idle_s, 0.0)
    fastest = max(configured, num_tokens / busy_s if busy_s > 0.0 else 0.0)
    return max(0.1, fastest * min(1.0, idle_s / wall_s))


@dataclass(frozen=True, slots=True)
class Throughputs:
    """The estimate of each model, and an assumption for models whose lines have not run."""

    assumed: ThroughputEstimate
    by_model: Mapping[str, ThroughputEstimate] = field(default_factory=dict)

    def of(self, model: str) -> ThroughputEstimate:
        """Return the estimate of a model; without a name: of the only one, if there is one."""
        if not model and len(self.by_model) == 1:
            return next(iter(self.by_model.values()))
        return self.by_model.get(model, self.assumed)


class RemainingWork(NamedTuple):
    """Work of a batch that is left."""

    expires_s: float
    tokens_by_model: Mapping[str, float]  # expected; without a name: of any model, as the file is not validated yet
    schedule: Schedule = ALWAYS
    owner: str = ""
    priority: int = 0  # among batches of its owner
    is_paused: bool = False

    @property
    def num_tokens(self) -> float:
        return sum(self.tokens_by_model.values())

    def tokens_at(self, model: str) -> float:
        return self.tokens_by_model.get(model, 0.0) + (self.tokens_by_model.get("", 0.0) if model else 0.0)

    def is_before(self, other: "RemainingWork") -> bool:
        if self.is_paused:
            return False
        if self.owner == other.owner and self.priority != other.priority:
            return self.priority < other.priority
        return self.expires_s <= other.expires_s

    def seconds(self, throughputs: Throughputs) -> float:
        times = (tokens / throughputs.of(model).tokens_per_s for model, tokens in self.tokens_by_model.items())
        return max(times, default=0.0)


def remaining_work(
    record: BatchRecord, progress: Progress, throughputs: Throughputs, shares: ModelShares | None = None
) -> RemainingWork:
    """Estimate the work that is left, from the batch's own finished lines.

    `shares`: by the model that runs the lines; None: by the model that the lines name."""
    shares = record.model_shares() if shares is None else shares
    num_lines = record.num_lines or record.input_lines
    num_ended = progress.counts.num_ended
    line_bytes = record.input_bytes / max(num_lines, 1)
    per_line = sum(share * throughputs.of(model).line_tokens(line_bytes) for model, share in shares.items())
    if num_ended:
        observed = (progress.usage.input_tokens + progress.usage.output_tokens) / num_ended
        per_line += (observed - per_line) * num_ended / (num_ended + _TRUST_LINES)
    num_tokens = max(0, num_lines - num_ended) * per_line
    tokens_by_model = {model: share * num_tokens for model, share in shares.items()}
    is_paused = record.paused_s is not None
    return RemainingWork(
        record.expires_s, tokens_by_model, _known_schedule(record), record.owner, record.priority, is_paused
    )


def _known_schedule(record: BatchRecord) -> Schedule:
    try:
        return schedule_of(record)
    except InvalidRequest:
        return ALWAYS


def estimate_eta(work: RemainingWork, others: Sequence[RemainingWork], throughputs: Throughputs, now: float) -> Eta:
    """Estimate when a batch ends beside the others, all of them scheduled by least slack."""
    earlier = [other for other in others if other.is_before(work)]
    expected_s = 0.0
    for model, tokens in work.tokens_by_model.items():
        before = sum(other.tokens_at(model) if model else other.num_tokens for other in earlier)
        expected_s = max(expected_s, (before + tokens) / throughputs.of(model).tokens_per_s)
    is_measured = all(throughputs.of(model).is_measured for model in work.tokens_by_model)
    slow_s, finish_s, fast_s = (work.schedule.after(now, expected_s / pace) for pace in (_SLOWER, 1.0, _FASTER))
    if slow_s <= work.expires_s:
        return Eta(risk=Risk.FITS, finish_s=finish_s, is_measured=is_measured, estimated_s=now)
    risk, finish_s = (Risk.CANNOT_FIT, fast_s) if fast_s > work.expires_s else (Risk.AT_RISK, finish_s)
    return Eta(risk=risk, finish_s=finish_s, is_measured=is_measured, estimated_s=now, fitting_s=slow_s)
