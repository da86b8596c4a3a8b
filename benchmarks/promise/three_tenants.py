"""Shows three tenants on one server for ten minutes: one chats, one floods, and one has a batch for the night.

    python -m benchmarks.promise.three_tenants              # or --minutes 3
    python -m benchmarks.promise.three_tenants --port 8000  # and watch http://127.0.0.1:8000/dashboard meanwhile

The pocket model and a file of three keys. `chatty` sends a chat a second, `flood` keeps 48 streams open, and `nightly`
submits a batch that may not begin before 60 % of the time is over: the night. Every minute says what each has had. At
the end stand the batch, and what the cluster counted for each key.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from alignedserve.core.metrics import percentile
from alignedserve.runtime.model.named_models import POCKET
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.server import ALIGNEDSERVE, served
from benchmarks.measuring.tenant_load import Tenant, write_keys

WEIGHTS = {"chatty": 1.0, "flood": 1.0, "nightly": 1.0}
NUM_OPEN, NUM_LINES = 48, 400
NIGHT_BEGINS = 0.6  # of the time
STEP_S = 60.0


def submit(port: int, folder: Path, night_s: float) -> str:
    """Submit the batch for the night, as `nightly`; return its id."""
    lines = folder / "letters.jsonl"
    body = {"model": POCKET, "max_tokens": 60}
    lines.write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": f"letter-{number}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {**body, "messages": [{"role": "user", "content": f"count from {number} to {number + 9}"}]},
                }
            )
            + "\n"
            for number in range(NUM_LINES)
        )
    )
    begins = datetime.fromtimestamp(night_s, UTC).isoformat(timespec="seconds")
    said = client(port, "batch", "submit", str(lines), "--not-before", begins, "--window", "1h")
    print(said)
    return next(word for word in said.split() if word.startswith("batch_")).strip(".,:")


def client(port: int, *command: str, key: str = "nightly") -> str:
    """Return what a command of `alignedserve` says with this key."""
    called = [ALIGNEDSERVE, *command, "--url", f"http://127.0.0.1:{port}"]
    environment = os.environ | {"ALIGNEDSERVE_API_KEY": key, "COLUMNS": "110"}
    answer = subprocess.run(called, env=environment, capture_output=True, text=True, check=False, timeout=120.0)
    return (answer.stdout + answer.stderr).strip()


async def show(port: int, seconds: float, batch: str) -> None:
    """Let chats and the flood come, and say each minute what came."""
    chatty, flood = (Tenant(port, name, POCKET) for name in ("chatty", "flood"))
    begin_s = time.perf_counter()
    end_s = begin_s + seconds

    async def report() -> None:
        shown_s, num_chats = begin_s, 0
        while (now_s := shown_s + STEP_S) <= end_s:
            await asyncio.sleep(now_s - time.perf_counter())
            rates = [sum(shown_s <= one < now_s for one in each.token_times_s) / STEP_S for each in (chatty, flood)]
            ttfts_ms, num_chats = sorted(1e3 * one for one in chatty.ttfts_s[num_chats:]), len(chatty.ttfts_s)
            state = await asyncio.to_thread(client, port, "batch", "status", batch)
            first = f"{percentile(ttfts_ms, 50):.0f} ms (p99 {percentile(ttfts_ms, 99):.0f})"
            minute = f"minute {(now_s - begin_s) / 60:.0f}"
            print(f"{minute}: chatty {rates[0]:.0f} tokens/s, first token {first}; flood {rates[1]:.0f} tokens/s")
            print(state, flush=True)
            shown_s = now_s

    await asyncio.gather(chatty.chat(end_s), flood.flood(NUM_OPEN, end_s), report())


def main() -> None:
    """Serve, and show."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    seconds = 60.0 * arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_keys(folder / "keys.yaml", WEIGHTS)
        settings = [f"gateway.keys_file={folder / 'keys.yaml'}", "decode.max_running_requests=16"]
        with served(POCKET, settings) as port:
            print(f"http://127.0.0.1:{port}/dashboard")
            batch = submit(port, folder, time.time() + NIGHT_BEGINS * seconds)
            asyncio.run(show(port, seconds, batch))
            print(client(port, "batch", "status", batch))
            for key in WEIGHTS:
                print(client(port, "usage", "--by", "key,class", key=key))


if __name__ == "__main__":
    main()
