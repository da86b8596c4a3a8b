"""The section of files and batches."""

import re

from alignedserve.config.sections.base import MIB, Section

_MOST_ACTIVE = 2500  # of the 10 000 that all keys may have together
LONGEST_LIFETIME_S = 100 * 366 * 86_400.0  # of what is stored: every store can hold its end
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.=-]+)*/?")


class BatchesConfig(Section, frozen=True):
    """Files and batches of best-effort lines. Their records are in the folder unless ALIGNEDSERVE_REDIS_URL names a
    Redis."""

    enabled: bool = True  # false: no files, batches, stored responses or usage, and no state server
    # State that outlives restarts, on the head; when unset one per port, under the user's state folder.
    # s3://BUCKET/PREFIX: contents of files are there, and all else in that folder.
    folder: str | None = None
    s3_endpoint: str | None = None  # of a bucket that is not Amazon's, http(s)://HOST:PORT
    namespace: str = "alignedserve"  # what keys in a shared Redis begin with
    max_file_bytes: int = 200_000_000  # of one input file
    max_files_bytes: int = 10_000_000_000  # of all input files of one key
    max_files: int = 1000  # of one key
    max_lines: int = 50_000  # of one batch
    max_line_bytes: int = 4 * MIB
    max_active: int = 100  # batches of one key that are not over, at most 2500
    max_in_flight: int | None = None  # lines in the cluster at a time; unset: of each model twice what its workers run
    assumed_tokens_per_s: float = 500.0  # for quotes, until lines have run and their rate is known
    max_attempts: int = 8  # of a line that was taken and did not come to an end
    file_lifetime_s: float = 30 * 24 * 3600.0  # of a file without `expires_after`

    def __post_init__(self) -> None:
        self._require(self.folder is None or bool(self.folder), "folder", "must name a folder")
        is_place = "://" not in (self.folder or "") or bool(_BUCKET.fullmatch(self.folder or ""))
        self._require(is_place, "folder", "must be a folder or s3://BUCKET/PREFIX")
        is_url = self.s3_endpoint is None or bool(re.fullmatch(r"https?://[^/\s@]+/?", self.s3_endpoint))
        self._require(is_url, "s3_endpoint", "must be http(s)://HOST:PORT, without credentials")
        self._require(self.s3_endpoint is None or self.is_in_bucket, "s3_endpoint", "needs a bucket in batches.folder")
        self._require(bool(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.namespace)), "namespace", "must be a plain word")
        self._require_positive("max_file_bytes", "max_files_bytes", "max_files", "max_lines", "max_line_bytes")
        self._require_positive("max_active", "max_attempts")
        self._require(self.max_active <= _MOST_ACTIVE, "max_active", f"must be at most {_MOST_ACTIVE}")
        is_lifetime = 0.0 < self.file_lifetime_s <= LONGEST_LIFETIME_S
        self._require(is_lifetime, "file_lifetime_s", f"must be above 0 and at most {LONGEST_LIFETIME_S:.0f}")
        is_rate = 0.0 < self.assumed_tokens_per_s <= 1e9
        self._require(is_rate, "assumed_tokens_per_s", "must be above 0 and at most 1000000000")
        self._require(self.max_in_flight is None or self.max_in_flight > 0, "max_in_flight", "must be above 0")

    @property
    def is_in_bucket(self) -> bool:
        return self.folder is not None and self.folder.startswith("s3://")
