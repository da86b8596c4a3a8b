"""The pool's shared memory: what is mapped, what is refused, and whose files are cleaned up."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, NotEnoughMemory
from alignedserve.runtime.device.memory_maps import HUGE_PAGE
from alignedserve.runtime.kv.arena_files import arena_folder, remove_stale_arenas
from alignedserve.runtime.kv.shm_arena import NO_LEASE, Arena, _blocks_offset
from tests.support.marks import each
from tests.support.samples import blocks

LAYOUT = BlockLayout(block_size=8, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
NUM_BLOCKS = 600  # their generations fill more than one page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.arena"


def open_files(path: Path) -> int:
    """Return how often this process holds the file open or mapped, whether or not it still exists."""
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    names += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(name.startswith(str(path)) for name in names)


# --- one memory for both ends


def test_both_ends_see_the_same_bytes_and_generations(path: Path) -> None:
    pool = Arena.create(path, LAYOUT, NUM_BLOCKS)
    worker = Arena.attach(path, LAYOUT)
    assert worker.num_blocks == NUM_BLOCKS
    assert not pool.generations.any()
    pool.stamp(blocks(0, NUM_BLOCKS - 1), 7)
    worker.blocks[NUM_BLOCKS - 1] = 9
    worker.blocks[0, 0] = 3
    assert worker.generations.tolist() == [7, *[0] * (NUM_BLOCKS - 2), 7]
    assert (pool.blocks[NUM_BLOCKS - 1] == 9).all()
    assert pool.blocks[0, 0] == 3
    worker.close()
    pool.close(unlink=True)
    assert not path.exists()


def test_free_blocks_belong_to_no_lease(path: Path) -> None:
    pool = Arena.create(path, LAYOUT, 2)
    assert not pool.is_stamped(blocks(0, 1), NO_LEASE)
    pool.stamp(blocks(0), 7)
    assert not pool.is_stamped(blocks(0, 1), 7)
    pool.close(unlink=True)


def test_the_file_is_its_owners_alone(path: Path) -> None:
    pool = Arena.create(path, LAYOUT, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    pool.close()


def test_creating_replaces_what_lies_there_and_leaves_its_mappings_alone(path: Path) -> None:
    first = Arena.create(path, LAYOUT, 2)
    worker = Arena.attach(path, LAYOUT)
    worker.blocks[:] = 1
    second = Arena.create(path, LAYOUT, 2)
    assert not second.blocks.any()
    assert (first.blocks == 1).all()
    for arena in (first, second, worker):
        arena.close()


def test_an_arena_that_is_no_longer_used_gives_its_memory_back(path: Path) -> None:
    """Workers map a new arena whenever the pool comes back; the old one must not stay with them."""
    pool = Arena.create(path, LAYOUT, NUM_BLOCKS)
    worker = Arena.attach(path, LAYOUT)
    assert (worker.blocks == 0).all()
    pool.close(unlink=True)
    del worker
    assert open_files(path) == 0


def test_a_large_arena_is_on_huge_pages_where_the_system_has_them() -> None:
    """All of it is taken and zero, whichever pages it got; it is mapped where huge pages fit."""
    num_blocks = 3 * HUGE_PAGE // LAYOUT.block_bytes
    with tempfile.TemporaryDirectory(dir=arena_folder()) as folder:
        pool = Arena.create(Path(folder) / "pool.arena", LAYOUT, num_blocks)
        worker = Arena.attach(pool.path, LAYOUT)
        for arena in (pool, worker):
            assert (arena.blocks.ctypes.data - _blocks_offset(num_blocks)) % HUGE_PAGE == 0
        assert pool.path.stat().st_blocks * 512 >= num_blocks * LAYOUT.block_bytes
        assert not worker.blocks.any()
        pool.blocks[-1] = 5
        assert (worker.blocks[-1] == 5).all()
        pool.close(unlink=True)
        assert (worker.blocks[-1] == 5).all()
        worker.close()
        assert open_files(pool.path) == 0


# --- refused


@each(
    ("place", "value", "problem"),
    [
        (0, b"X", "not an arena of this version"),
        (0, b"ALSVKV02", "not an arena of this version"),
        (8, b"\xff" * 32, "its block layout is not this worker's"),
        (40, (3).to_bytes(8, "little"), "it is smaller than its header says"),
        (40, b"\xff" * 8, "it is smaller than its header says"),
        (40, b"\x00" * 8, "it has no blocks"),
        (48, (1).to_bytes(8, "little"), "its block layout is not this worker's"),
    ],
)
def test_a_wrong_header_is_refused(path: Path, place: int, value: bytes, problem: str) -> None:
    Arena.create(path, LAYOUT, 2).close()
    content = bytearray(path.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(HandoffRejected, match=f"arena pool.arena refused: {problem}"):
        Arena.attach(path, LAYOUT)
    assert open_files(path) == 0


@each("length", [0, 10, 55, 56, 4096, 8192, 8192 + 2 * LAYOUT.block_bytes - 1])
def test_a_truncated_file_is_refused(path: Path, length: int) -> None:
    Arena.create(path, LAYOUT, 2).close()
    os.truncate(path, length)
    with pytest.raises(HandoffRejected, match=r"cut short|smaller than its header says"):
        Arena.attach(path, LAYOUT)


def test_a_file_that_is_absent_or_a_folder_is_refused(path: Path) -> None:
    with pytest.raises(HandoffRejected, match="no arena at"):
        Arena.attach(path, LAYOUT)
    path.mkdir()
    with pytest.raises(HandoffRejected, match="no arena at"):
        Arena.attach(path, LAYOUT)


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    pool = Arena.create(target, LAYOUT, 2)
    path.symlink_to(target)
    with pytest.raises(HandoffRejected, match="no arena at"):
        Arena.attach(path, LAYOUT)
    Arena.create(path, LAYOUT, 2).close()  # replaces the link, not what it points to
    assert not path.is_symlink()
    assert open_files(target) > 0
    pool.close()


# --- memory that is not there


def test_without_memory_it_says_what_to_set(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NotEnoughMemory, match=r"the KV pool needs \d+ MiB .* set pool.memory_bytes to at most \d+MiB"):
        Arena.create(path, LAYOUT, NUM_BLOCKS)
    assert not path.exists()
    assert open_files(path) == 0


def test_a_full_memory_file_system(tmp_path: Path) -> None:
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.getuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        with pytest.raises(NotEnoughMemory, match=r"where 1 MiB are free; set pool.memory_bytes to at most 1MiB"):
            Arena.create(tmp_path / "pool.arena", LAYOUT, NUM_BLOCKS)
        assert list(tmp_path.iterdir()) == []
        Arena.create(tmp_path / "pool.arena", LAYOUT, 100).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- files of killed processes

OWNER = """
import sys, time
from pathlib import Path
from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.kv.shm_arena import Arena
arena = Arena.create(Path(sys.argv[1]), BlockLayout(8, 2, 2, 8, "float32"), 2)
arena.blocks[:] = 77
print("up", flush=True)
time.sleep(60)
"""


def start_owner(path: Path) -> subprocess.Popen[str]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    return owner


def kill(owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.communicate()


def test_files_of_killed_processes_go_and_files_in_use_stay(tmp_path: Path) -> None:
    dead, alive, foreign = (tmp_path / f"{name}.arena" for name in ("ours-dead", "ours-alive", "theirs-dead"))
    owner = start_owner(alive)
    killed = start_owner(dead)
    worker = Arena.attach(dead, LAYOUT)  # a mapping does not keep the file
    kill(killed)
    foreign.write_bytes(b"")
    assert remove_stale_arenas(tmp_path, "ours-") == [dead]
    assert sorted(tmp_path.iterdir()) == [alive, foreign]
    assert (worker.blocks == 77).all()
    kill(owner)
    assert remove_stale_arenas(tmp_path, "ours-") == [alive]


def test_a_symbolic_link_is_not_cleaned_up_through(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x")
    (tmp_path / "ours-link.arena").symlink_to(target)
    assert remove_stale_arenas(tmp_path, "ours-") == []
    assert target.exists()


def test_blocks_are_where_the_layout_of_the_file_says(path: Path) -> None:
    pool = Arena.create(path, LAYOUT, 2)
    pool.blocks[1] = 5
    pool.stamp(blocks(1), 3)
    content = path.read_bytes()
    assert len(content) == 8192 + 2 * LAYOUT.block_bytes
    assert content[:8] == b"ALSVKV01"
    assert content[8:40] == LAYOUT.digest()
    assert np.frombuffer(content, np.uint64, 2, 40).tolist() == [2, LAYOUT.block_bytes]
    assert np.frombuffer(content, np.uint64, 2, 4096).tolist() == [0, 3]
    assert set(content[8192 + LAYOUT.block_bytes :]) == {5}
    pool.close()
