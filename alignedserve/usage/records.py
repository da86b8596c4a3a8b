"""What clients used: tokens, seconds and requests of an hour, by key, model and class. No clock and no I/O."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

HOUR_S = 3600
DAY_S = 24 * HOUR_S
REAL_TIME, BEST_EFFORT, BATCH = "real_time", "best_effort", "batch"
SEVERAL_MODELS = "(several)"  # of a batch whose lines name more than one
GROUPS = ("key", "model", "class")


class UsageSubject(NamedTuple):
    """Whose use of what is counted together."""

    key: str  # the name of the client's key
    model: str
    request_class: str


class UsageCounts(msgspec.Struct, frozen=True):
    """Sums over requests, as their answers told them."""

    requests: int = 0  # that have an answer, or a part of one; a line of a batch is one
    input_tokens: int = 0
    cached_tokens: int = 0  # of `input_tokens`, from the prefix cache
    output_tokens: int = 0
    compute_us: int = 0  # microseconds that workers computed for them

    def plus(self, other: "UsageCounts", sign: int = 1) -> "UsageCounts":
        """Return the sum of both; with a `sign` of -1 the difference."""
        return UsageCounts(
            self.requests + sign * other.requests,
            self.input_tokens + sign * other.input_tokens,
            self.cached_tokens + sign * other.cached_tokens,
            self.output_tokens + sign * other.output_tokens,
            self.compute_us + sign * other.compute_us,
        )


class UsageRow(msgspec.Struct, frozen=True):
    """The stored counts of one subject in one hour."""

    key: str
    model: str
    request_class: str
    counts: UsageCounts

    @property
    def subject(self) -> UsageSubject:
        return UsageSubject(self.key, self.model, self.request_class)


class UsageResult(NamedTuple):
    """Counts of a bucket of time, of all that one group has in common."""

    start_s: int
    group: tuple[str | None, ...]  # in the order of GROUPS; None: not grouped by it
    counts: UsageCounts


def hour_of(unix_s: float) -> int:
    return int(unix_s) // HOUR_S * HOUR_S


def row_id(subject: UsageSubject) -> str:
    return hashlib.blake2b(msgspec.json.encode(subject), digest_size=16).hexdigest()


def key_id(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def grouped(
    rows: Mapping[int, Sequence[UsageRow]], *, bucket_s: int, by: Sequence[str], key: str | None = None
) -> list[UsageResult]:
    """Add up the rows of hours into buckets and groups, in order of time and name. `key`: of this one alone."""
    sums: dict[tuple[int, tuple[str | None, ...]], UsageCounts] = {}
    for hour, of_hour in rows.items():
        for row in of_hour:
            if key is None or row.key == key:
                group = tuple(value if name in by else None for name, value in zip(GROUPS, row.subject, strict=True))
                at = (hour // bucket_s * bucket_s, group)
                sums[at] = sums.get(at, UsageCounts()).plus(row.counts)
    ordered = sorted(sums, key=lambda at: (at[0], [value or "" for value in at[1]]))
    return [UsageResult(*at, sums[at]) for at in ordered]
