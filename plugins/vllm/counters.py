"""Counters of the scheduler under vLLM's own `/metrics`.

The scheduler runs in vLLM's engine process, `/metrics` is answered by another one. The first writes its counters to a
small file that both map into memory; the second reads them when it is asked.
"""

import mmap
import struct
import tempfile
from pathlib import Path

COUNTERS = (
    *("steps", "plain_steps", "held_requests", "preemptions", "chats", "documents", "chat_tokens", "document_tokens"),
    *("missed_ttft", "missed_tpot", "missed_deadline", "bad_terms"),
    *("step_seconds", "predicted_seconds", "plan_seconds"),
)  # docs/vllm.md says what each is
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
        return float(struct.unpack_from("d", self._values, _PLACES[name])[0])

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def read_counters(path: Path) -> dict[str, float]:
    """Return the counters; none where no engine of this machine writes there."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    is_whole = len(content) == _SIZE
    return dict(zip(COUNTERS, struct.unpack(f"{len(COUNTERS)}d", content), strict=True)) if is_whole else {}
