"""One end of block transfers as a process of its own, to be killed, stopped and cut off.

python -m tests.harnesses.block_peer owner ADDRESS TIMEOUT_S     prints where it listens, then serves
python -m tests.harnesses.block_peer client ADDRESS TIMEOUT_S NAME TRANSPORT    prints after every round, or "lost"
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import PeerLost
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer
from tests.harnesses.link_peer import credentials_of

LAYOUT = BlockLayout(block_size=16, num_layers=8, num_kv_heads=8, head_dim=64, dtype="float32")  # 512 KiB
NUM_BLOCKS = 192
PER_PEER = 96  # of the owner's blocks
SECRET = b"p" * 32
BLOCKS = tuple(BlockId(i) for i in range(NUM_BLOCKS))


def identity(name: str, timeout_s: float) -> Identity:
    role = Role.DECODE_WORKER if name.startswith("decode") else Role.PREFILL_WORKER
    return Identity(role, name, SECRET, timeout_s, credentials_of(name))


class Owner:
    """A candidate buffer and its block server."""

    def __init__(self, folder: Path, address: str, timeout_s: float) -> None:
        self.arena = Arena.create(folder / "candidates.arena", LAYOUT, NUM_BLOCKS)
        who = identity("prefill-0", timeout_s)
        self.server = BlockServer(
            ArenaBuffer(self.arena), address, identity=who, transports=("gloo", "tcp"), open_channel=open_channel
        )

    def close(self) -> None:
        self.server.close()
        self.arena.close(unlink=True)


class BlockClient:
    """A storage full of random bytes and a transfer to a block server, where it uses blocks that no other one does."""

    def __init__(self, address: str, timeout_s: float, name: str = "decode-0", transport: str = "gloo") -> None:
        index = int(name.rpartition("-")[2])
        self._far = BLOCKS[index * PER_PEER : (index + 1) * PER_PEER]
        self.storage = BlockStorage(LAYOUT, PER_PEER)
        self.bytes = self.storage.bytes.numpy()
        self.bytes[:] = np.random.default_rng(3).integers(0, 256, self.bytes.shape, np.uint8)
        self.transfer = ChannelTransfer(self.storage, address, identity=identity(name, timeout_s), transport=transport)
        self.num_rounds = threading.Semaphore(0)  # that have ended, for another thread to wait for

    def round(self, generation: int, num_blocks: int = PER_PEER) -> None:
        """Offload blocks, fetch them and compare. Raises PeerLost."""
        mine, before = BLOCKS[:num_blocks], self.bytes[:num_blocks].copy()
        (runs,) = self.transfer.offload([OffloadRequest(mine, self._far[:num_blocks][::-1], generation)])
        assert runs is not None
        self.bytes[:num_blocks] = 0
        copy = BlockCopy(generation, num_blocks * LAYOUT.block_size, runs)
        assert self.transfer.fetch([FetchRequest(copy, mine)]) == [True]
        assert (self.bytes[:num_blocks] == before).all()
        self.num_rounds.release()

    def round_until_lost(self) -> float:
        """Go on with rounds, and return the time at which the other end was found to be lost."""
        generation = 1
        while True:
            try:
                self.round(generation)
            except PeerLost:
                return time.monotonic()
            generation += 1


class PeerProcess:
    """This module, or another one, as a process, perhaps elsewhere (`prefix`). Its first line of output is `.said`."""

    def __init__(self, *arguments: str, prefix: Sequence[str] = (), module: str = "tests.harnesses.block_peer") -> None:
        command = [*prefix, sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.said = self.line()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; the time of it."""
        self._process.send_signal(number)
        return time.monotonic()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    role, address, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if role == "owner":
        owner = Owner(Path(sys.argv[4]), address, timeout_s)
        print(owner.server.address, flush=True)
        time.sleep(60)
        return
    client = BlockClient(address, timeout_s, name=sys.argv[4], transport=sys.argv[5])
    for generation in range(1, 10_000):
        try:
            client.round(generation)
        except PeerLost:
            print("lost", time.monotonic(), flush=True)
            time.sleep(60)
            return
        print("round", flush=True)


if __name__ == "__main__":
    main()
