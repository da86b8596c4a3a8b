"""What a client's key may do: its entry in keys.yaml, of which requests and batch lines carry one."""

from enum import Enum

import msgspec

from alignedserve.core.request import MAX_PRIORITY

FLEX, DEFAULT, PRIORITY = "flex", "default", "priority"
TIERS = (DEFAULT, PRIORITY, FLEX)
_SAME_TIER = {"fast": PRIORITY, "standard_only": DEFAULT}  # other words for a tier
_AUTO = "auto"
NAMED = "key."  # begins the owner of an entry of the file, which a plain key's digest never does
MAX_KEYS_BYTES = 64 << 20  # of a file of keys


class Limit(Enum):
    """What may be limited, by the name of its field."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    OPEN = "open_requests"
    BATCH_TOKENS = "enqueued_batch_tokens"


class KeyEntry(msgspec.Struct, frozen=True, gc=False):
    """The rights and limits of one client. None: no limit."""

    name: str  # as logs, usage and refusals call it
    owner: str  # of the files, batches and responses that are stored for it
    weight: float = 1.0  # of its share of what several clients ask for at once
    default_tier: str = DEFAULT  # of requests that name none
    tiers: frozenset[str] = frozenset(TIERS)
    min_priority: int = -MAX_PRIORITY  # smaller goes first
    max_priority: int = MAX_PRIORITY
    models: tuple[str, ...] | None = None  # that it may name; a star at the end stands for anything
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and of the answers that are asked for
    open_requests: int | None = None  # at any time
    enqueued_batch_tokens: int | None = None  # of batches that have not ended
    may_see_usage: bool = False  # of all keys, and what tells of all: metrics and the live page
    is_revoked: bool = False  # neither secrets nor tokens let it in

    @property
    def sees_all(self) -> bool:
        """Return whether it may read what tells of all keys; one without rights of its own, outside the file, may."""
        return self.may_see_usage or not self.owner.startswith(NAMED)

    def may_change(self, owner: str) -> bool:
        """Return whether it may replace or remove adapters of this owner; empty: an unknown owner."""
        return owner in ("", self.owner) or self.sees_all

    @property
    def is_real_time(self) -> bool:
        """Return whether it may ask for answers for which a person waits."""
        return self.tiers != {FLEX}

    def tier_of(self, name: str) -> str | None:
        """Return the tier of a request that names this one (`auto`: the key's default); None: it may not have it."""
        tier = self.default_tier if name == _AUTO else _SAME_TIER.get(name, name)
        return tier if tier in self.tiers else None

    def may_have_priority(self, priority: int) -> bool:
        return self.min_priority <= priority <= self.max_priority

    def may_use(self, *names: str) -> bool:
        return self.models is None or any(
            name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
            for pattern in self.models
            for name in names
        )


ANYONE = KeyEntry("anyone", "anyone", may_see_usage=True)  # where no keys are set
