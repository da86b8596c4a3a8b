"""Frames between the ranks of a worker, read by as many threads as there are ranks and peers."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: what failed here ended the process, not the test.
_THREADS = """
import threading
import msgspec
from alignedserve.runtime.engine.ranks.frames import decode, encode

for _ in range(300):
    class Inner(msgspec.Struct, frozen=True, tag=True):
        places: tuple[int, ...] | None
    class Other(msgspec.Struct, frozen=True, tag=True):
        by_name: dict[str, list[int]]
    class Frame(msgspec.Struct, frozen=True):
        command: Inner | Other
        number: int
    payload = encode(Frame(Other({"a": [1]}), 3))
    together = threading.Barrier(4)
    def read():
        together.wait()
        assert decode(payload, Frame).number == 3
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_read_a_kind_of_frame_for_the_first_time_at_once() -> None:
    found = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
