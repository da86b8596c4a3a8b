"""What 10 000 keys cost: a request's check, and reading the file again while requests come.

    python -m benchmarks.keys [--output benchmarks/results/keys.json]

The check is what the middleware and the first count of a request do: find the entry, charge the request. While the file
is replaced again and again, requests of a key that is in all versions are checked on the event loop; none may fail.
"""

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from alignedserve.api.errors import Unauthorized
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.gateway.shown_limits import ShownLimits
from alignedserve.keys.edit import change_keys
from alignedserve.keys.file import KeyRow, SecretRow, parse_keys, render_keys
from alignedserve.keys.ring import CurrentKeys, digest_of
from alignedserve.keys.watch import KeysWatch

_NUM_KEYS, _NUM_CHECKS, _NUM_RELOADS = 10_000, 20_000, 5


def rows(weight: float = 1.0) -> tuple[KeyRow, ...]:
    """Return the keys, whose secrets are their names."""
    return tuple(
        KeyRow(
            name=f"team-{number}",
            secrets=(SecretRow(digest_of(f"team-{number}").hex()),),
            weight=weight,
            requests_per_minute=1_000_000,
            tokens_per_minute=10_000_000,
        )
        for number in range(_NUM_KEYS)
    )


async def checks_us(keys: CurrentKeys) -> list[float]:
    """Return the time of the processor for one check, in five rounds."""
    api_keys, quotas, times = ApiKeys(keys), RequestQuotas(None), []
    for _ in range(5):
        began_s = time.process_time()  # of this process alone, whoever else uses the machine
        for number in range(_NUM_CHECKS):
            entry = api_keys.authenticate("/v1/chat/completions", f"team-{number % _NUM_KEYS}")
            await quotas.count(entry, ShownLimits())
        times.append((time.process_time() - began_s) / _NUM_CHECKS * 1e6)
    return times


def _replaced(rows: Sequence[KeyRow], _before: Sequence[KeyRow]) -> Sequence[KeyRow]:
    return rows


async def reloads(keys: CurrentKeys, watch: KeysWatch, path: Path) -> dict[str, float]:
    """Replace the file while requests are checked; return how long new keys took, and the longest pause."""
    api_keys, is_over, checked, pauses = ApiKeys(keys), False, 0, [0.0]
    lost = 0

    async def ask() -> None:
        nonlocal checked, lost
        last_s = time.perf_counter()
        while not is_over:
            try:
                api_keys.authenticate("/v1/chat/completions", "team-7")
            except Unauthorized:
                lost += 1
            checked += 1
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - last_s)
            last_s = time.perf_counter()

    asking, watching = asyncio.create_task(ask()), asyncio.create_task(watch.run())
    took = []
    for version in range(_NUM_RELOADS):
        text_rows = rows(weight=2.0 + version)
        await asyncio.to_thread(change_keys, path, partial(_replaced, text_rows))
        began_s = time.perf_counter()
        while keys.ring.owned_by("key.team-7").weight != 2.0 + version:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        took.append(time.perf_counter() - began_s)
    is_over = True
    await asking
    watching.cancel()
    return {
        "reload_s_median": round(median(took), 3),
        "reload_s_max": round(max(took), 3),
        "requests_checked": checked,
        "requests_lost": lost,
        "longest_pause_ms": round(max(pauses) * 1e3, 1),
    }


async def measure() -> dict[str, object]:
    """Return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.yaml"
        change_keys(path, lambda _: rows())
        keys = CurrentKeys()
        watch = KeysWatch(keys, (), path)
        began_s = time.process_time()
        assert watch.look(), "the first reading"
        reading_s = time.process_time() - began_s
        times = await checks_us(keys)
        text = render_keys(rows())
        began_s = time.process_time()
        parse_keys(text)
        parse_s = time.process_time() - began_s
        edited = text + "\n# edited by hand\n- name: by-hand\n"
        began_s = time.process_time()
        parse_keys(edited)
        edited_s = time.process_time() - began_s
        return {
            "num_keys": _NUM_KEYS,
            "check_cpu_us_min": round(min(times), 2),
            "check_cpu_us_median": round(median(times), 2),
            "check_cpu_us_max": round(max(times), 2),
            "reload_cpu_s": round(reading_s, 3),
            "parse_cpu_s": round(parse_s, 3),
            "parse_any_yaml_cpu_s": round(edited_s, 3),
            **await reloads(keys, watch, path),
        }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    result = asyncio.run(measure()) | {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, two cores that others used as well",
        "command": "python -m benchmarks.keys",
        "commit": arguments.commit,
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
