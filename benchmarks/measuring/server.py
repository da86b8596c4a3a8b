"""A server of this checkout as measurements start it, and load on it by `alignedserve bench serve`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alignedserve.process.addresses import free_ports

ALIGNEDSERVE = str(Path(sys.executable).with_name("alignedserve"))
READY_TIMEOUT_S = 120.0
TOPOLOGIES = ("elastic", "colocated", "disaggregated")
# A cache of that shape that is filled soon. A virtual machine gets most of its memory at the first write, which takes
# 2.4 s for a GiB, and prompts that filled a cache for the first time took 1.3 times as long: what is measured first
# would pay for what is measured last.
CACHE_FILLED_SOON = "decode.kv_cache_bytes=1536MiB"
# Of the 125M OPT shape.
_SETTINGS = (
    "model.random_weights=true",
    "model.dtype=bfloat16",
    "decode.kv_cache_bytes=4GiB",
    "decode.max_running_requests=128",
    "decode.max_num_batched_tokens=2048",
    "router.max_prefill_tokens_per_worker=4096",
)
_OF_SEPARATE_WORKERS = (
    "prefill.kv_cache_bytes=1GiB",
    "prefill.max_num_batched_tokens=2048",
    "pool.memory_bytes=4GiB",
)


def free_port() -> int:
    return free_ports(1)[0]


class ServerEnded(Exception):
    """The process that was to be ready."""


def wait_ready(port: int, server: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until /ready answers 200. Raises ServerEnded if `server` does, TimeoutError if it takes too long."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server is not None and server.poll() is not None:
            raise ServerEnded
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise TimeoutError("the server was not ready in time")


def settings_of(topology: str) -> list[str]:
    """Return the settings of a server of the 125M OPT shape with this topology."""
    separate = _OF_SEPARATE_WORKERS if topology == "disaggregated" else ()
    return [*_SETTINGS, *separate, f"topology={topology}"]


def options_of(settings: Iterable[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@contextlib.contextmanager
def served(model: str | Path | None, settings: Sequence[str] = (), *options: str) -> Iterator[int]:
    """Serve a model for as long as the context lasts, and return the port. None: the models that the options name."""
    port = free_port()
    models = [str(model)] if model is not None else []
    command = [ALIGNEDSERVE, "serve", *models, "--port", str(port), *options, *options_of(settings)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"ALIGNEDSERVE_API_KEYS": ""})
        try:
            wait_ready(port, server)
            yield port
        except ServerEnded:
            log.seek(0)
            raise RuntimeError(f"the server ended: {log.read().decode(errors='replace')[-2000:]}") from None
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def load_report(port: int, *options: str) -> dict[str, Any]:
    """Return what `bench serve` saw of completions with these options. It may be that none completed."""
    command = [ALIGNEDSERVE, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--endpoint", "completions"]
    answer = subprocess.run(
        [*command, "--ignore-eos", "--json", "-", *options], capture_output=True, text=True, check=False
    )
    if not answer.stdout:
        raise RuntimeError(f"bench serve: {answer.stderr}")
    report: dict[str, Any] = json.loads(answer.stdout)["report"]
    return report
