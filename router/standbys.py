"""Decides which workers of a node stand by: loaded and registered, without work until another one is lost or drains.

Of the workers that decode, as many have work as each of them says (`num_active`), by name; a worker that has requests
is never put to rest. One that comes back after a loss finds its place taken, and stands by in its turn.
"""

from collections.abc import Callable, Collection, Mapping

from router.state import WorkerRecord


class Standbys:
    """The standbys of all nodes: `WorkerRecord.is_standby`."""

    def __init__(
        self,
        nodes: Mapping[str, Mapping[str, WorkerRecord]],
        draining: Callable[[], Collection[str]],
        on_change: Callable[[WorkerRecord], None],
    ) -> None:
        """`nodes`: the registered workers by the pool of their node. `draining`: the names of those that drain."""
        self._nodes = nodes
        self._draining = draining
        self._on_change = on_change

    def settle(self, node: str) -> None:
        """Let as many workers of this node have work as are to, now that one has come, gone, or begun to drain."""
        draining = self._draining()
        able = [one for _, one in sorted(self._nodes.get(node, {}).items()) if one.registered.can_decode]
        able = [one for one in able if one.registered.num_active and one.name not in draining]
        if not able:
            return
        num_missing = able[0].registered.num_active - sum(not one.is_standby for one in able)
        for one in [one for one in able if one.is_standby][: max(num_missing, 0)]:
            self._change(one, is_standby=False)
        idle = [one for one in reversed(able) if not one.is_standby and not one.prefilling and not one.decoding]
        for one in idle[: max(-num_missing, 0)]:
            self._change(one, is_standby=True)

    def _change(self, worker: WorkerRecord, *, is_standby: bool) -> None:
        worker.is_standby = is_standby
        self._on_change(worker)
