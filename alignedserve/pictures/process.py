"""The process that decodes pictures: what harms a decoder harms it, and nothing else.

Reads two frames for each picture, a Task and the file; writes one, the Outcome. The operating system bounds its memory
and, for each picture, its time.
"""

import os
import resource
import sys

import msgspec

from alignedserve.pictures.decoding import decode
from alignedserve.pictures.outcomes import Outcome, Refused, Task
from alignedserve.process.child_process import bound_time
from alignedserve.process.frames import read_frame, write_frame

_MAX_MEMORY_BYTES = 3 << 30  # of addresses, most of which are other things than memory in use
_MAX_CPU_S = 10.0  # of a core, for one picture
_NICENESS = 5  # streams and passes go first where cores are few


def main() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tasks = msgspec.msgpack.Decoder(Task)
    while (described := read_frame(source)) is not None and (content := read_frame(source)) is not None:
        bound_time(_MAX_CPU_S)
        write_frame(target, msgspec.msgpack.encode(_outcome(content, tasks.decode(described))))


def _outcome(content: bytes, task: Task) -> Outcome:
    try:
        return decode(content, task)
    except Exception:  # noqa: BLE001  (decoders raise anything over broken files, and none of it is for others' eyes)
        return Refused("broken")
