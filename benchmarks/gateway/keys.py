"""What 10 000 keys cost: a request's check, a token's, and new keys on every gateway while requests come.

    python -m benchmarks.gateway.keys [--gateways 3] [--output benchmarks/results/keys.json]

The check is what the middleware and the first count of a request do: find the entry, charge the request. While the file
is replaced again and again, every gateway (a process each) checks requests of a key that is in all versions on its
event loop; none may fail. Every row of a version differs from the one before. `handed_on`: until a gateway of
another host has the keys of the head's file; here both are in one process, whose interpreter they share.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from alignedserve.api.errors import Unauthorized
from alignedserve.api.work_lanes import favour_the_loop
from alignedserve.config.sections.gateway import JwtIssuer
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.head_keys import HeadKeys
from alignedserve.gateway.jwt.verifier import TokenVerifier
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.gateway.shown_limits import ShownLimits
from alignedserve.keys.edit import change_keys
from alignedserve.keys.file import KeyRow, SecretRow, parse_keys, render_keys
from alignedserve.keys.ring import CurrentKeys, digest_of
from alignedserve.keys.watch import KeysFile, KeysWatch
from tests.support.servers.state_links import state_hosts

_NUM_KEYS, _NUM_CHECKS, _NUM_RELOADS = 10_000, 20_000, 7
_PATH = "/v1/chat/completions"
_SETTLE_S = 1.0


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
            entry = await api_keys.authenticate(_PATH, f"team-{number % _NUM_KEYS}")
            await quotas.count(entry, ShownLimits())
        times.append((time.process_time() - began_s) / _NUM_CHECKS * 1e6)
    return times


async def tokens_us(keys: CurrentKeys, folder: Path) -> dict[str, float]:
    """Return the time of the processor for a token's first check and for each one after that."""
    rsa_key, ec_key = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())
    published = [
        RSAAlgorithm.to_jwk(rsa_key.public_key(), as_dict=True) | {"kid": "RS256"},
        ECAlgorithm.to_jwk(ec_key.public_key(), as_dict=True) | {"kid": "ES256"},
    ]
    path = folder / "jwks.json"
    path.write_text(json.dumps({"keys": published}))
    issuer = JwtIssuer(issuer="https://issuer.example", audience=("alignedserve",), jwks=str(path))
    api_keys = ApiKeys(keys, TokenVerifier([issuer]))
    found = {}
    for algorithm, key in (("RS256", rsa_key), ("ES256", ec_key)):
        claims = {"iss": issuer.issuer, "aud": "alignedserve", "exp": time.time() + 3600.0}
        tokens = [
            jwt.encode(claims | {"sub": f"team-{number}"}, key, algorithm, {"kid": algorithm}) for number in range(500)
        ]
        await api_keys.authenticate(_PATH, tokens[0])  # fetches the keys
        for turn, more in (("first", tokens[1:]), ("again", tokens[1:] * 20)):
            began_s = time.process_time()
            for token in more:
                await api_keys.authenticate(_PATH, token)
            took_us = (time.process_time() - began_s) / len(more) * 1e6
            found[f"token_{turn}_cpu_us_{algorithm.lower()}"] = round(took_us, 2)
    return found


def _replaced(rows: Sequence[KeyRow], _before: Sequence[KeyRow]) -> Sequence[KeyRow]:
    return rows


async def follow(path: Path) -> None:
    """Be a gateway: check requests until the last version is there; print when each came, and what was lost."""
    favour_the_loop()  # as a gateway does
    keys = CurrentKeys()
    watch = KeysWatch(keys, (), KeysFile(path))
    await watch.look()
    api_keys, last_weight = ApiKeys(keys), 1.0 + _NUM_RELOADS
    watching = asyncio.create_task(watch.run())
    came: dict[float, float] = {}
    checked, lost, pause_s, last_s = 0, 0, 0.0, time.perf_counter()
    print("up", flush=True)
    while last_weight not in came:
        try:
            entry = await api_keys.authenticate(_PATH, "team-7")
            came.setdefault(entry.weight, time.time())
        except Unauthorized:
            lost += 1
        checked += 1
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        pause_s, last_s = max(pause_s, now_s - last_s), now_s
    watching.cancel()
    print(json.dumps({"came": came, "checked": checked, "lost": lost, "pause_s": pause_s}))


def reloads(path: Path, num_gateways: int) -> dict[str, Any]:
    """Replace the file while gateways check requests; return how long new keys took, and the longest pause."""
    command = [sys.executable, "-m", "benchmarks.gateway.keys", "--follow", str(path)]
    gateways = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_gateways)]
    for gateway in gateways:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == "up\n"
    written: dict[str, float] = {}
    for version in range(_NUM_RELOADS):
        weight = 2.0 + version
        change_keys(path, partial(_replaced, rows(weight)))
        written[str(weight)] = time.time()
        time.sleep(_SETTLE_S)
    told = [json.loads(gateway.communicate(timeout=120.0)[0]) for gateway in gateways]
    took = [one["came"].get(weight) for one in told for weight in written]
    seen = [(one["came"][weight] - at_s) for one in told for weight, at_s in written.items() if weight in one["came"]]
    return {
        "gateways": num_gateways,
        "reload_s_median": round(median(seen), 3),
        "reload_s_max": round(max(seen), 3),
        "reloads_seen": f"{len(seen)} of {len(took)}",  # others were replaced before they were read
        "requests_checked": sum(one["checked"] for one in told),
        "requests_lost": sum(one["lost"] for one in told),
        "longest_pause_ms": round(max(one["pause_s"] for one in told) * 1e3, 1),
    }


async def handed_on(folder: Path, path: Path) -> dict[str, float]:
    """Return how long it takes from a change of the head's file until a gateway of another host has its keys."""
    took, keys = [], CurrentKeys()
    async with state_hosts(folder) as hosts:
        watches = [KeysWatch(CurrentKeys(), (), KeysFile(path), hosts.keys)]
        await watches[0].look()
        watches.append(KeysWatch(keys, (), HeadKeys(hosts.client())))
        await watches[1].look()
        watching = [asyncio.create_task(watch.run()) for watch in watches]
        for version in range(_NUM_RELOADS):
            weight = 100.0 + version
            await asyncio.to_thread(change_keys, path, partial(_replaced, rows(weight)))
            began_s = time.perf_counter()
            while keys.ring.owned_by("key.team-7").weight != weight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            took.append(time.perf_counter() - began_s)
        for task in watching:
            task.cancel()
    return {"handed_on_s_median": round(median(took), 3), "handed_on_s_max": round(max(took), 3)}


async def costs(folder: Path, path: Path) -> dict[str, Any]:
    """Return what checks and reading cost this process."""
    keys = CurrentKeys()
    watch = KeysWatch(keys, (), KeysFile(path))
    began_s = time.process_time()
    assert await watch.look(), "the first reading"
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
        **await tokens_us(keys, folder),
        "reload_cpu_s": round(reading_s, 3),
        "parse_cpu_s": round(parse_s, 3),
        "parse_any_yaml_cpu_s": round(edited_s, 3),
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--follow", type=Path, help="be a gateway that goes by this file")
    arguments = parser.parse_args()
    if arguments.follow is not None:
        asyncio.run(follow(arguments.follow))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.yaml"
        change_keys(path, lambda _: rows())
        result = asyncio.run(costs(Path(folder), path)) | {"load_before": round(os.getloadavg()[0], 1)}
        result |= reloads(path, arguments.gateways)
        result |= asyncio.run(handed_on(Path(folder), path))
    result |= {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores",
        "load_after": round(os.getloadavg()[0], 1),
        "command": "python -m benchmarks.gateway.keys",
        "commit": arguments.commit,
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
