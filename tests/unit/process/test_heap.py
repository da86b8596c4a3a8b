"""What a process keeps after its start: garbage collection, free memory, pages of files."""

import ctypes
import gc
import subprocess
import sys

import numpy as np
import psutil
import pytest

from alignedserve.process.heap import forget_pages_of_files, settle_heap, unwritten_mappings


@pytest.fixture
def _collector_restored() -> object:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("_collector_restored")
def test_what_exists_is_looked_at_no_more_and_later_cycles_are_still_freed() -> None:
    settle_heap()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] > 700
    before = len(gc.get_objects())
    cycle: list[object] = []
    cycle.append(cycle)
    assert len(gc.get_objects()) > before
    del cycle
    assert gc.collect() >= 1


SMAPS = """\
7f00000-7f02000 r--p 00000000 08:01 12 /lib/clean.so
Rss:                   8 kB
Anonymous:             0 kB
Swap:                  0 kB
7f02000-7f03000 r-xp 00002000 08:01 12 /lib/clean.so
Anonymous:             0 kB
Swap:                  0 kB
7f03000-7f04000 r--p 00003000 08:01 12 /lib/relocated.so
Anonymous:             4 kB
Swap:                  0 kB
7f04000-7f05000 r--p 00003000 08:01 12 /lib/swapped out.so
Anonymous:             0 kB
Swap:                  4 kB
7f05000-7f06000 rw-p 00004000 08:01 12 /lib/written.so
Anonymous:             0 kB
7f06000-7f07000 r--s 00000000 00:01 13 /dev/shm/shared
Anonymous:             0 kB
7f07000-7f08000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f08000-7f09000 r-xp 00000000 00:00 0                                    [vdso]
Anonymous:             0 kB
"""


def test_pages_of_files_that_nobody_wrote_are_told_from_all_others() -> None:
    assert unwritten_mappings(SMAPS) == [(0x7F00000, 0x7F02000), (0x7F02000, 0x7F03000)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forgotten")
def test_a_process_goes_on_without_the_pages_of_its_files() -> None:
    before = psutil.Process().memory_full_info()
    forget_pages_of_files()
    after = psutil.Process().memory_full_info()
    assert before.shared - after.shared > 4 << 20
    assert np.linalg.norm(np.eye(3)) == pytest.approx(3**0.5)


FAULTS_OF_PASSES = """
import ctypes, resource
from alignedserve.process.heap import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
keep_freed_memory()
for turn in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    places = [ctypes.c_void_p(libc.malloc(8 << 20)) for _ in range(8)]
    for place in places:
        ctypes.memset(place, 1, 8 << 20)
    for place in places:
        libc.free(place)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no such option")
def test_what_a_pass_takes_and_frees_is_not_given_anew_to_the_next() -> None:
    told = subprocess.run([sys.executable, "-c", FAULTS_OF_PASSES], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 100, "of 16 384 pages"
