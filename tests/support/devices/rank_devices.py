"""Workers of several ranks whose blocks are in memories of their own, each on a stand-in for a device: on threads."""

import contextlib
import socket
import threading
from functools import partial
from pathlib import Path

from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.collectives import Collectives
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.ranks.follower_process import FollowerEngine
from alignedserve.runtime.engine.ranks.rank_group import FollowerCopies, GroupCopies
from alignedserve.runtime.engine.ranks.rank_spec import Meeting, RankEngineSpec, load_shard, make_storage
from alignedserve.runtime.engine.worker_engine import LoadedRank
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.served_model import ServedModel
from tests.support.devices.device_stand_in import Machine, StandInStorage
from tests.support.devices.ranked_engines import ThreadRanks, make_collectives

_ELSEWHERE = Meeting(None, Path(), None)  # each rank's blocks are in memory of its own


class RanksOnDevices(ThreadRanks):
    """The ranks beside the first. Their copies are those of processes, over the same connections."""

    copies: GroupCopies

    def __init__(self, spec: RankEngineSpec, others: list[Collectives]) -> None:
        self._storages = [make_storage(spec, other.rank, _ELSEWHERE) for other in others]
        self.connections: list[socket.socket] = []  # the other ranks' ends
        super().__init__(
            [partial(_follower, spec, *each) for each in zip(others, self._storages, strict=True)],
        )

    def put_on(self, machine: Machine, name: str) -> None:
        """Let each rank's blocks lie on a device of its own, and begin to copy them."""
        pairs = [socket.socketpair() for _ in self._storages]
        self.connections = [theirs for _, theirs in pairs]
        for index, theirs in enumerate(self.connections):
            storage = StandInStorage(self._storages[index], machine.device(device_of(name, index + 1)))
            follower = FollowerCopies(theirs, storage, self.performed[index])
            threading.Thread(target=follower.follow, daemon=True).start()
        self.copies = GroupCopies([ours for ours, _ in pairs], lambda: self.num_frames)

    def lose(self, rank: int) -> None:
        """End a rank's copies, as its death would."""
        with contextlib.suppress(OSError):
            self.connections[rank - 1].shutdown(socket.SHUT_RDWR)

    @override
    def kill(self) -> None:
        """Nothing hangs here."""

    @override
    def close(self) -> None:
        if self.connections:
            self.copies.end()
        super().close()


def device_of(name: str, rank: int) -> str:
    """Return the name of the device that a rank of a worker has."""
    return name if rank == 0 else f"{name}/{rank}"


def load_on_devices(
    served: ServedModel, spec: RankEngineSpec, layout: BlockLayout, progress: Path | None
) -> LoadedRank:
    """Stand in for load_ranks."""
    first, *others = make_collectives(spec.size)
    group = RanksOnDevices(spec, others)
    return LoadedRank(load_shard(spec, first), make_storage(spec, 0, _ELSEWHERE), None, group)  # type: ignore[arg-type]


def _follower(spec: RankEngineSpec, collectives: Collectives, storage: BlockStorage) -> FollowerEngine:
    return FollowerEngine(
        model=load_shard(spec, collectives),
        storage=storage,
        options=spec.engine_options,
        streams=streams_of(storage.device),
    )
