"""A bucket, apart from its client: most clusters need none."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ObjectStoreLocation:
    """A bucket and its server: plain values that can be sent to every process."""

    url: str  # s3://BUCKET/PREFIX
    endpoint: str | None = None  # None: Amazon's
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)  # AWS_ variables: credentials, region
