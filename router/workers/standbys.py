"""Decides which workers get nothing new: draining ones, and the standbys of a node.

Standbys are loaded and registered, without work until another worker is lost or drains. Of the workers that decode, as
many have work as each of them says (`num_active`), by name; a worker that has requests is never put to rest. One that
comes back after a loss finds its place taken, and stands by in its turn.
"""

from collections.abc import Callable, Collection, Mapping

from router.state import WorkerRecord


class Standbys:
    """The draining workers and the standbys of all nodes: `WorkerRecord.is_draining`, `is_standby`."""

    def __init__(
        self, nodes: Mapping[str, Mapping[str, WorkerRecord]], on_change: Callable[[WorkerRecord], None]
    ) -> None:
        """`nodes`: the registered workers by the pool of their node. `on_change`: is told of each that changes."""
        self._nodes = nodes
        self._on_change = on_change
        self._draining: frozenset[str] = frozenset()  # workers and pools, registered or not; membership only

    def is_draining(self, name: str | None) -> bool:
        return name in self._draining

    def set_draining(self, names: Collection[str], workers: Mapping[str, WorkerRecord]) -> None:
        """Let these workers and pools drain, and no others. `workers`: all that are registered, by name."""
        self._draining = frozenset(names)
        for worker in workers.values():
            self._note_rest(worker)
        for node in tuple(self._nodes):
            self.settle(node)

    def add(self, worker: WorkerRecord, *, is_decoding: bool) -> None:
        """Let a worker that registers have work, or none until `settle`. `is_decoding`: it has requests already."""
        worker.is_standby = worker.registered.num_active > 0 and worker.registered.can_decode and not is_decoding
        worker.is_draining = self._rests(worker)

    def settle(self, node: str) -> None:
        able = [one for _, one in sorted(self._nodes.get(node, {}).items()) if one.registered.can_decode]
        able = [one for one in able if one.registered.num_active and one.name not in self._draining]
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
        self._note_rest(worker)

    def _note_rest(self, worker: WorkerRecord) -> None:
        rests = self._rests(worker)
        if worker.is_draining != rests:
            worker.is_draining = rests
            self._on_change(worker)

    def _rests(self, worker: WorkerRecord) -> bool:
        return worker.is_standby or worker.name in self._draining
