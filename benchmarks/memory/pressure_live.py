"""Caches for a third of the demand, live: what a server computes again, and whether objectives hold, by three ways.

    python -m benchmarks.memory.pressure_live  # about 15 minutes, on a quiet machine
    python -m benchmarks.memory.pressure_live --duration 60 --repeats 1

A model of 125M OPT's shape with random weights in bfloat16, one elastic worker. Chat: Mooncake's lengths, documents:
arXiv's, both up to 2 048 tokens, with objectives that the worker holds where memory is not short. The memory is a third
of what all of them hold at once. What has to leave is dropped (`recompute`), swapped to the host within iterations
(`swap`, the default), or may leave to the pool of the node (`pool`); the ways take turns. What is computed again is
counted by the worker (`alignedserve_recomputed_tokens_total`). The prefix cache is off.
"""

import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served, settings_of, traffic_report

TOKEN_BYTES = 12 * 2 * 768 * 2
DEMAND_TOKENS = 12 * 1600  # eight documents, and four chats
TRAFFIC = (
    "chat: mooncake, max_total=2048, rate=0.12, ttft=6, tpot=0.6",
    "documents: arxiv, max_total=2048, outstanding=8, tier=flex",
)
WAYS = {
    "recompute": ("decode.swap_space_bytes=0",),
    "swap": ("decode.swap_space_bytes=2GiB",),
    "pool": ("decode.swap_space_bytes=2GiB", "decode.pool_bytes=2GiB"),
}
_COUNTER = r"^alignedserve_{name}_total\{{[^}}]*\}} (\S+)"
_TOLD_S = 2.0  # by when a gateway knows what its workers counted


def measure(folder: Path, way: str, share: float, duration_s: float) -> dict[str, Any]:
    """Serve in this way, and return what the load got. `share`: of the demand."""
    kv_cache = f"decode.kv_cache_bytes={int(share * DEMAND_TOKENS * TOKEN_BYTES)}"
    own = ("prefix_cache.enabled=false", "decode.count=1", kv_cache, *WAYS[way])
    settings = [one for one in settings_of("elastic") if "kv_cache_bytes" not in one and "prefill" not in one]
    with served(folder, [*settings, *own]) as port:
        report = traffic_report(port, folder, TRAFFIC, duration_s)
        time.sleep(_TOLD_S)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    return {
        "way": way,
        "share": share,
        "computed_again": _counted(text, "recomputed_tokens"),
        "num_evictions": _counted(text, "evictions"),
        "classes": {one["name"]: one for one in report["classes"]},
    }


def _counted(text: str, name: str) -> float:
    return sum(map(float, re.findall(_COUNTER.format(name=name), text, re.MULTILINE)))


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of the page's table."""
    chat, documents = row["classes"]["chat"], row["classes"]["documents"]
    return (
        f"{row['way']}: computed again {row['computed_again']:.0f}, evictions {row['num_evictions']:.0f}, "
        f"chat {chat['slo_attainment']}, with a long gap {chat['stalled']}, "
        f"documents {documents['output_tokens_per_s']}"
    )


def main() -> None:
    """Measure every way, in turns, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--duration", type=float, default=90.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_opt_125m(Path(folder) / "opt-125m")
        for _ in range(options.repeats):
            for way in options.ways:
                rows.append(measure(model, way, options.share, options.duration))
                print(line_of(rows[-1]), flush=True)
                if not options.no_record:
                    write_result("serving/memory_pressure", {"traffic": TRAFFIC, "rows": rows})


if __name__ == "__main__":
    main()
