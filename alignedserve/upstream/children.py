"""vLLM as an engine of ours: `vllm serve` children with our scheduler inside, restarted when they end.

    alignedserve serve --engine vllm [NAME=]MODEL ... --engine-count 2 --engine-args '--max-model-len 8192'

The gateway stands before them as before any upstream. Children listen on this machine alone, with a key of their own.
"""

import asyncio
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from alignedserve.process.addresses import free_ports
from alignedserve.process.background_tasks import start_background

logger = logging.getLogger(__name__)

SCHEDULER = "alignedserve_vllm.AlignedScheduler"
_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S, _LOOK_S, _END_S = 1.0, 60.0, 60.0, 0.5, 20.0
_OURS = ("--port", "--host", "--api-key", "--scheduler-cls", "--scheduling-policy", "--served-model-name")


class VllmChildren:
    """The children of this process: `start` once, `stop` once."""

    def __init__(self, command: str, models: Sequence[str], count: int, arguments: str, default: Slo) -> None:
        """`models`: [NAME=]MODEL; `count`: children of each; `default`: objectives that requests leave out.

        Raises ConfigError.
        """
        program = shutil.which(command)
        if program is None or Path(command).name != "vllm":
            raise ConfigError("--engine must be vllm, or the path of a vllm command; none is there")
        try:
            words = shlex.split(arguments)
        except ValueError as error:
            raise ConfigError("--engine-args must be words as in a shell; a quote is open") from error
        if taken := [word for word in words if word.partition("=")[0] in _OURS]:
            raise ConfigError(f"--engine-args must leave out {taken[0].partition('=')[0]}, which is set here")
        if not models:
            raise ConfigError("--engine needs a model: a folder, or ORG/NAME on a hub")
        self.key = secrets.token_urlsafe(24)
        options = {f"slo_{name}_ms": 1000.0 * target_s for name, target_s in default.targets if name != "deadline"}
        self._commands: dict[str, list[str]] = {}
        for model in models:
            name, _, source = model.rpartition("=")
            for port in free_ports(count):
                self._commands[f"http://127.0.0.1:{port}"] = [
                    *(program, "serve", source, "--served-model-name", name or Path(source).name),
                    *("--host", "127.0.0.1", "--port", str(port), "--scheduling-policy", "priority"),
                    *("--scheduler-cls", SCHEDULER, "--additional-config", json.dumps({"alignedserve": options})),
                    *words,
                ]
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._commands)

    async def start(self) -> None:
        """Start every child and wait until each answers. Raises ConfigError: a child ends before it answers."""
        for url in self._commands:
            await self._spawn(url)
        async with aiohttp.ClientSession(trust_env=False) as session:
            for url in self._commands:
                await self._answering(session, url)
        self._tasks = [start_background(self._keep(url), f"the engine at {url}") for url in self._commands]

    async def stop(self) -> None:
        """End all children. May be repeated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children, self._running = list(self._running.values()), {}
        for child in children:
            with suppress(ProcessLookupError):
                child.terminate()
        for child in children:
            try:
                await asyncio.wait_for(child.wait(), _END_S)
            except TimeoutError:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()

    async def _spawn(self, url: str) -> None:
        devices = _devices(self.urls.index(url), len(self.urls))
        # A session of its own: a Ctrl-C here begins with a drain. A kill of this process ends the child.
        holder = [setpriv, "--pdeathsig", "TERM"] if (setpriv := shutil.which("setpriv")) else []
        self._running[url] = await asyncio.create_subprocess_exec(
            *holder,
            *self._commands[url],
            env={**os.environ, "VLLM_API_KEY": self.key} | devices,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _answering(self, session: aiohttp.ClientSession, url: str) -> None:
        child = self._running[url]
        while child.returncode is None:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_LOOK_S)
        raise ConfigError(f"vLLM ended with status {child.returncode} before it answered; its log above says why")

    async def _keep(self, url: str) -> None:
        """Start the child anew whenever it ends, after a longer pause each time that it ends early."""
        pause_s, clock = _PAUSE_S, asyncio.get_running_loop().time
        while True:
            began_s = clock()
            status = await self._running[url].wait()
            with suppress(ProcessLookupError):  # leftovers, such as an engine that holds a device's memory
                os.killpg(self._running[url].pid, signal.SIGKILL)
            pause_s = _PAUSE_S if clock() - began_s > _STEADY_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            logger.warning("the engine at %s ended with status %s; it starts again in %.0f s", url, status, pause_s)
            await asyncio.sleep(pause_s)
            await self._spawn(url)


def _devices(number: int, count: int) -> dict[str, str]:
    """Return the share of the devices that CUDA_VISIBLE_DEVICES names, where it can be divided evenly."""
    devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    size = len(devices) // count
    if count < 2 or not size or size * count != len(devices):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[number * size : (number + 1) * size])}
