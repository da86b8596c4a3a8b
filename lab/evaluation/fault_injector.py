"""Faults for a cluster under load: its processes are killed and stopped, one after the other."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_FEWEST = 4  # faults
STOPPED_S = 8.0  # longer than links.peer_timeout_s: when it wakes, every peer has dropped it


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one process."""

    at_s: float  # since the load began
    victim: str  # kind of process
    is_killed: bool  # SIGKILL; else SIGSTOP, and SIGCONT after STOPPED_S


def plan_faults(duration_s: float, seed: int, *, is_separate: bool) -> list[Fault]:
    """Plan to kill and to stop every kind of worker once, and the pool; where there is one kind more often.

    The faults are evenly spread, in an order given by the seed. `is_separate`: prompts and decodes have workers of
    their own.
    """
    victims = ("DecodeWorker", "PrefillWorker", "KvPool") if is_separate else ("ColocatedWorker",)
    pairs = [(victim, is_killed) for victim in victims for is_killed in (True, False)]
    pairs *= -(-_FEWEST // len(pairs))
    random.Random(f"{seed}/faults").shuffle(pairs)  # noqa: S311 - an order, not a secret
    gap_s = duration_s / (len(pairs) + 1)
    return [Fault(gap_s * (number + 1), *pair) for number, pair in enumerate(pairs)]


class FaultInjector:
    """Injects planned faults into this process's descendants; `on_fault` is called with each as it happens."""

    def __init__(self, faults: list[Fault], on_fault: Callable[[Fault], None]) -> None:
        self._faults = faults
        self._on_fault = on_fault
        self.done: list[Fault] = []

    async def run(self) -> None:
        """Inject the faults as planned. Cancelled, it wakes the process that it stopped."""
        began_s = time.monotonic()
        for fault in self._faults:
            await asyncio.sleep(max(began_s + fault.at_s - time.monotonic(), 0.0))
            victims = processes_of(fault.victim)
            if not victims:
                continue  # it has not come back yet from what happened before
            self._on_fault(fault)
            self.done.append(fault)
            await _inflict(fault, victims[0])


def processes_of(kind: str) -> list[psutil.Process]:
    victims = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = process.cmdline()[:1]
            if title and title[0].startswith("ray::") and f"{kind}Actor" in title[0]:
                victims.append((process.create_time(), process))
    return [process for _, process in sorted(victims, key=lambda entry: entry[0])]


async def _inflict(fault: Fault, victim: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if fault.is_killed:
            victim.kill()
            return
        victim.suspend()
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            victim.resume()
