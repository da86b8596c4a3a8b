"""Chat beside documents on a model with windows, served: whole caches, and rings in the same memory.

    python -m benchmarks.memory.windows_live    # about six minutes, on a quiet machine
    python -m benchmarks.memory.windows_live --duration 60 --repeats 1

A small Gemma 3 of random weights, one elastic worker. Chat: Mooncake's lengths; documents: arXiv's, up to 3 500 tokens,
twelve outstanding. Whole caches hold 6 826 tokens. Both ways take turns.
"""

import tempfile
from pathlib import Path
from typing import Any

from alignedserve.runtime.model.served_model import RING, WHOLE
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_gemma3
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served, traffic_report

TRAFFIC = (
    "chat: mooncake, max_total=2000, rate=0.5, ttft=2, tpot=0.2",
    "documents: arxiv, max_total=3500, outstanding=12, tier=flex",
)
SETTINGS = (
    "model.random_weights=true",
    "model.dtype=bfloat16",
    "model.max_context_len=4096",
    "decode.count=1",
    "decode.kv_cache_bytes=40MiB",
)


def measure(folder: Path, way: str, duration_s: float) -> dict[str, Any]:
    """Serve in this way, and return what the load got."""
    with served(folder, [*SETTINGS, f"engine.window_cache={way}"]) as port:
        report = traffic_report(port, folder, TRAFFIC, duration_s)
    return {"way": way, "classes": {one["name"]: one for one in report["classes"]}}


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line to read."""
    chat, documents = row["classes"]["chat"], row["classes"]["documents"]
    return (
        f"{row['way']}: chat holds both {chat['slo_attainment']}, TTFT p90 {chat['ttft_s']['p90']:.2f} s, TPOT p90 "
        f"{chat['tpot_s']['p90']:.3f} s, longest gap {chat['tbt_s']['max']:.2f} s; documents "
        f"{documents['num_completed']} of {documents['num_sent']}, {documents['output_tokens_per_s']:.0f} tokens/s, "
        f"TTFT p90 {documents['ttft_s']['p90']:.1f} s"
    )


def main() -> None:
    """Measure both ways, in turns, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_gemma3(Path(folder) / "gemma3")
        for _ in range(options.repeats):
            for way in (WHOLE, RING):
                rows.append(measure(model, way, options.duration))
                print(line_of(rows[-1]), flush=True)
    write_result("memory/windows_live", {"traffic": TRAFFIC, "settings": SETTINGS, "rows": rows})


if __name__ == "__main__":
    main()
