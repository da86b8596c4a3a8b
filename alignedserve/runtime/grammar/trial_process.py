"""The process in which clients' grammars are compiled for the first time: one that takes too long ends with it.

Native code cannot be interrupted, and no count of its steps bounds its time: a thousand repetitions in one pattern
multiply what a step takes. So the operating system bounds the time of a core, and the memory.

Reads frames: the token table, then grammars. Writes a frame for each grammar: empty, or the reason why it is refused.
A frame is its length (4 bytes, little-endian) and so many bytes.
"""

import math
import resource
import sys
import time
from typing import IO

import msgspec
from llguidance import LLTokenizer

from alignedserve.core.errors import UnsupportedModel
from alignedserve.runtime.grammar.compiler import GrammarError, compile_now, unsupported_model
from alignedserve.runtime.grammar.vocabulary import TokenTable

_LEN_BYTES = 4
_MAX_MEMORY_BYTES = 4 << 30  # of addresses, half of which are other things than memory in use


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Write one frame. Raises OSError if nobody reads."""
    stream.write(len(content).to_bytes(_LEN_BYTES, "little") + content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read one frame; None: the stream has ended."""
    header = stream.read(_LEN_BYTES)
    if len(header) < _LEN_BYTES:
        return None
    count = int.from_bytes(header, "little")
    content = stream.read(count)
    return content if len(content) == count else None


def main() -> None:
    """Compile grammars until the input ends. Argument: the seconds of a core that each may take."""
    max_cpu_s = float(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    described = read_frame(source)
    if described is None:
        return
    vocabulary = _load(described)
    while (grammar := read_frame(source)) is not None:
        _bound_time(max_cpu_s)
        write_frame(target, _refusal(vocabulary, grammar.decode()).encode())


def _load(described: bytes) -> LLTokenizer | GrammarError:
    try:
        return msgspec.msgpack.decode(described, type=TokenTable).vocabulary()
    except UnsupportedModel as error:
        return unsupported_model(error)


def _bound_time(max_cpu_s: float) -> None:
    """Let the system end this process once it has worked so much longer; it counts whole seconds."""
    limit = math.ceil(time.process_time() + max_cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _refusal(vocabulary: LLTokenizer | GrammarError, grammar: str) -> str:
    """Return why a grammar is refused; empty: it is not."""
    try:
        if isinstance(vocabulary, GrammarError):
            raise vocabulary
        compile_now(vocabulary, grammar)
    except GrammarError as error:
        return str(error)
    return ""
