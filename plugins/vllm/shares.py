"""Fair shares of tenants by start tags (Goyal et al., SIGCOMM '96): who asks for more waits longer, nobody else does.

A request's tag is where its tenant's work ends so far, or the tag that is served now if that is later; its tokens then
move the tenant's end on. Documents go by tag. A chat whose tag is far ahead of what is served gives way first where not
all chats can be in time. A silent tenant gets no credit for its silence.
"""

_AHEAD_TOKENS = 2048.0  # of work, by which a tenant may be ahead of what is served


class TenantShares:
    """Tags of the requests of all tenants."""

    def __init__(self) -> None:
        self._served = 0.0  # the latest tag of what has begun
        self._ends: dict[str, float] = {}
        self._num_here: dict[str, int] = {}

    @property
    def has_several(self) -> bool:
        """Return whether there is anybody to share with."""
        return len(self._num_here) > 1

    def arrived(self, tenant: str, cost: float) -> float:
        """Return the tag of a newcomer of `cost` tokens."""
        self._num_here[tenant] = self._num_here.get(tenant, 0) + 1
        tag = max(self._served, self._ends.get(tenant, 0.0))
        self._ends[tenant] = tag + cost
        return tag

    def left(self, tenant: str) -> None:
        self._num_here[tenant] -= 1
        if not self._num_here[tenant]:
            del self._num_here[tenant]
            self._served = max(self._served, self._ends.pop(tenant) if not self._num_here else self._served)
            self._ends.pop(tenant, None)

    def served(self, tag: float) -> None:
        """Note that a request with this tag has begun."""
        self._served = max(self._served, tag)

    def is_ahead(self, tag: float) -> bool:
        return tag > self._served + _AHEAD_TOKENS
