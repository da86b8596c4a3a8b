"""Faults of a cluster while a batch runs: a schedule of faults, the same for the same seed."""

import enum
import random
from typing import NamedTuple


class Target(enum.Enum):
    """Process that is hit."""

    GATEWAY = "gateway"
    DRIVER = "batch driver"
    ROUTER = "router"
    PREFILL = "prefill worker"
    DECODE = "decode worker"
    POOL = "pool"
    ALL = "all"  # every process of the cluster at once; after a SIGKILL `serve` is started again
    COMMAND = "serve"  # the command alone: what it leaves behind must go by itself; it is started again


class Hit(enum.Enum):
    """Kind of fault."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"  # and SIGCONT after a while


class KillFault(NamedTuple):
    """One blow."""

    target: Target
    hit: Hit
    pause_s: float  # since the fault before, or since the batch was made
    stopped_s: float = 0.0  # from SIGSTOP to SIGCONT


class KillSchedule(NamedTuple):
    """Faults that one batch has to survive."""

    seed: int
    faults: tuple[KillFault, ...]


_WEIGHTS = {
    Target.GATEWAY: 12,
    Target.DRIVER: 26,
    Target.ROUTER: 14,
    Target.PREFILL: 10,
    Target.DECODE: 12,
    Target.POOL: 10,
    Target.ALL: 7,
    Target.COMMAND: 3,
}
_STOP_SHARE = 0.35
_LONGEST_PAUSE_S = 2.5  # a batch of 500 short lines takes about three seconds
_STOPS_S = (0.05, 7.0)  # some longer than a peer may be silent


def make_schedule(seed: int) -> KillSchedule:
    rng = random.Random(seed)
    return KillSchedule(seed, tuple(_fault(rng) for _ in range(rng.choice((1, 1, 2, 2, 3)))))


def _fault(rng: random.Random) -> KillFault:
    target = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    pause_s = round(rng.uniform(0.0, _LONGEST_PAUSE_S), 3)
    if target is not Target.COMMAND and rng.random() < _STOP_SHARE:
        low, high = _STOPS_S
        return KillFault(target, Hit.STOP, pause_s, round(low * (high / low) ** rng.random(), 3))
    return KillFault(target, Hit.KILL, pause_s)
