"""The process in which clients' grammars are compiled for the first time: one that takes too long ends with it.

Native code cannot be interrupted, and no count of its steps bounds its time: a thousand repetitions in one pattern
multiply what a step takes. So the operating system bounds the time of a core, and the memory.

Reads frames: a TrialSetup, then grammars. Writes a frame for each grammar: empty, or the reason why it is refused."""

import resource
import sys

import msgspec
from llguidance import LLTokenizer

from alignedserve.core.errors import UnsupportedModel
from alignedserve.process.child_process import bound_time
from alignedserve.process.frames import read_frame, write_frame
from alignedserve.runtime.grammar.compiler import GrammarError, compile_now, try_step, unsupported_model
from alignedserve.runtime.grammar.vocabulary import TokenTable

_MAX_MEMORY_BYTES = 4 << 30  # of addresses, half of which are other things than memory in use


class TrialSetup(msgspec.Struct, frozen=True):
    """The first frame."""

    max_cpu_s: float  # of a core, that each grammar may take
    table: TokenTable


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    described = read_frame(source)
    if described is None:
        return
    setup = msgspec.msgpack.decode(described, type=TrialSetup)
    vocabulary = _load(setup.table)
    while (grammar := read_frame(source)) is not None:
        bound_time(setup.max_cpu_s)
        write_frame(target, _refusal(vocabulary, grammar.decode()).encode())


def _load(table: TokenTable) -> LLTokenizer | GrammarError:
    try:
        return table.vocabulary()
    except UnsupportedModel as error:
        return unsupported_model(error)


def _refusal(vocabulary: LLTokenizer | GrammarError, grammar: str) -> str:
    try:
        if isinstance(vocabulary, GrammarError):
            raise vocabulary
        try_step(compile_now(vocabulary, grammar))
    except GrammarError as error:
        return str(error)
    return ""
