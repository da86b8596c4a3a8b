"""Three keys on one server: tokens by weight in any ten seconds, and what a chat sees beside two floods.

    python -m benchmarks.promise.fair_shares  # some ten minutes: elastic and disaggregated
    python -m benchmarks.promise.fair_shares --topology elastic --tier flex

The pocket model, one worker that decodes, 16 places. Keys `heavy` and `light` of weights 2 and 1 flood it; a third key
sends a chat a second, of 48 tokens at most. First the chats alone; then beside as many streams as run at once, none of
which waits; then beside a backlog, for two minutes: 48 streams of each key are open, of 30 to 90 tokens. The second
tells what the machine's own time makes of a first token, and the third what the backlog adds. `--tier flex`: the floods
are best effort.
Targets: heavy by light 1.9 to 2.1 in any ten seconds; the chat's TTFT p99 within 1.1 times of alone.
"""

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alignedserve.core.metrics import percentile
from alignedserve.runtime.model.named_models import POCKET
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import served
from benchmarks.measuring.tenant_load import Tenant, windows, write_keys

WEIGHTS = {"heavy": 2.0, "light": 1.0, "third": 1.0}
NUM_PLACES, NUM_OPEN = 16, 48
WARM_UP_S = 10.0


async def phase(port: int, num_open: int, seconds: float, tier: str) -> dict[str, Any]:
    """Let chats come beside so many streams of each flooding key; return what each had after the warm-up."""
    heavy, light, third = (Tenant(port, name, POCKET) for name in WEIGHTS)
    begin_s = time.perf_counter() + WARM_UP_S
    end_s = begin_s + seconds

    async def chats() -> None:
        await asyncio.sleep(WARM_UP_S)
        await third.chat(end_s)

    floods = [one.flood(num_open, end_s, service_tier=tier) for one in (heavy, light) if num_open]
    await asyncio.gather(*floods, chats())
    ttfts_ms = sorted(1e3 * one for one in third.ttfts_s)
    row: dict[str, Any] = {
        "num_chats": len(ttfts_ms),
        "ttft_p50_ms": round(percentile(ttfts_ms, 50), 1),
        "ttft_p90_ms": round(percentile(ttfts_ms, 90), 1),
        "ttft_p99_ms": round(percentile(ttfts_ms, 99), 1),
    }
    if num_open:
        counted = windows((heavy, light), begin_s, end_s)
        ratios = [one["heavy"] / max(one["light"], 1) for one in counted]
        row["tokens_per_s"] = round(statistics.mean(one.total() for one in counted) / 10.0)
        row["heavy_by_light"] = {
            "min": round(min(ratios), 3),
            "mean": round(statistics.mean(ratios), 3),
            "max": round(max(ratios), 3),
            "windows": [round(one, 3) for one in ratios[::10]],
        }
    return row


def measure(topology: str, tier: str, seconds: float) -> dict[str, Any]:
    """Measure a server with this topology."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        write_keys(keys, WEIGHTS)
        sizes = ["decode.count=1", f"decode.max_running_requests={NUM_PLACES}"]
        settings = [f"topology={topology}", f"gateway.keys_file={keys}", *sizes]
        with served(POCKET, settings) as port:
            phases = {
                name: asyncio.run(phase(port, num_open, share * seconds, tier))
                for name, num_open, share in (
                    ("alone", 0, 0.5),
                    ("full", NUM_PLACES // 2, 0.5),
                    ("backlog", NUM_OPEN, 1),
                )
            }
    alone, full, backlog = (phases[name]["ttft_p99_ms"] for name in phases)
    return {
        "topology": topology,
        "tier": tier,
        "load_1min_before": round(load, 2),
        **phases,
        "ttft_p99_of_alone": round(backlog / alone, 2),
        "ttft_p99_of_full": round(backlog / full, 2),
    }


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__, name="serving/fair_shares")
    parser.add_argument("--topology", nargs="+", default=["elastic", "disaggregated"])
    parser.add_argument("--tier", default="default", choices=("default", "flex"), help="of the floods")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the backlog")
    arguments = parser.parse_args()
    rows = {(row["topology"], row["tier"]): row for row in read_figures(arguments.name) or []}
    for topology in arguments.topology:
        row = rows[topology, arguments.tier] = measure(topology, arguments.tier, arguments.seconds)
        print(row, flush=True)
        write_result(arguments.name, list(rows.values()))


if __name__ == "__main__":
    main()
