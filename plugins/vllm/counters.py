"""Counters of the scheduler under vLLM's own `/metrics`.

The scheduler runs in vLLM's engine process, `/metrics` is answered by another one. The first writes its counters to a
small file that both map into memory; the second reads them when it is asked.
"""

import mmap
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

COUNTERS = {
    "steps": "Steps that were planned.",
    "plain_steps": "Steps that vLLM ordered itself.",
    "held_requests": "Running requests that sat a step out, summed over steps.",
    "preemptions": "Requests that lost their cache.",
    "chats": "Chats that ended.",
    "documents": "Documents that ended.",
    "chat_tokens": "Tokens of chats that ended.",
    "document_tokens": "Tokens of documents that ended.",
    "missed_ttft": "Chats whose first token was late.",
    "missed_tpot": "Chats whose mean gap was too long.",
    "missed_deadline": "Requests that ended after their deadline.",
    "bad_terms": "Requests with terms that have no meaning, which ran as chats with default objectives.",
    "step_seconds": "Seconds of steps.",
    "predicted_seconds": "Seconds that steps were predicted to take.",
    "plan_seconds": "Seconds of planning.",
}
_PLACES = {name: 8 * place for place, name in enumerate(COUNTERS)}
_SIZE = 8 * len(COUNTERS)


def path_of(instance: str) -> Path:
    """Return the file of one engine: alike in all processes of a vLLM."""
    safe = "".join(letter if letter.isalnum() else "-" for letter in instance)
    return Path(tempfile.gettempdir()) / f"alignedserve-vllm-{safe}.counters"


class Counters:
    """Counters that grow, in memory, or in a file that other processes read."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._values: bytearray | mmap.mmap = bytearray(_SIZE)
        if path is not None:
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                self._values = mmap.mmap(file.fileno(), _SIZE)

    def add(self, name: str, amount: float = 1.0) -> None:
        place = _PLACES[name]
        struct.pack_into("d", self._values, place, struct.unpack_from("d", self._values, place)[0] + amount)

    def value(self, name: str) -> float:
        value: float = struct.unpack_from("d", self._values, _PLACES[name])[0]
        return value

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def read_counters(path: Path) -> Iterator[tuple[str, str, float]]:
    """Yield name, description and value of each counter; nothing where no engine of this machine writes there."""
    try:
        content = path.read_bytes()
    except OSError:
        return
    if len(content) == _SIZE:
        for name, about in COUNTERS.items():
            yield name, about, struct.unpack_from("d", content, _PLACES[name])[0]
