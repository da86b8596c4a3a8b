"""Schedules of faults: seeded, chosen to cover every pair, and cut down to the shortest that still fails."""

import enum
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


class Target(enum.Enum):
    """Process that is hit."""

    GATEWAY = "gateway"
    DRIVER = "batch driver"
    ROUTER = "router"
    PREFILL = "prefill worker"
    DECODE = "decode worker"
    POOL = "pool"


class Hit(enum.Enum):
    """Kind of fault. All but KILL last for a while."""

    KILL = "killed"
    STOP = "stopped, shorter than the peer time-out"
    LONG_STOP = "stopped, longer than the peer time-out"
    SLOW = "slow"  # four fifths of its time stopped
    CUT = "links cut"
    STATE_FULL = "killed, disk of the state full"
    LOGS_FULL = "killed, disk of the logs full"
    MEMORY_FULL = "killed, shared memory full"
    NO_FILES = "no file descriptor left"
    CLOCK_FORWARD = "clock an hour forward"
    CLOCK_BACK = "clock an hour back"


class Phase(enum.Enum):
    """Moment of the load at which a fault begins."""

    QUEUED = "queued"
    FIRST_TOKEN = "before the first token"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    PREFETCH = "prefetch"
    DECODE = "decode"
    FINISHING = "finishing"
    IDLE = "idle"
    STARTING = "starting"
    DRAINING = "draining"


_WEIGHTS = {Hit.KILL: 5, Hit.STOP: 3, Hit.LONG_STOP: 1, Hit.CUT: 3, Hit.SLOW: 2}  # all others 1
_DURATIONS_S = {  # shortest and longest; the peer time-out of the rooms is 1.5 s
    Hit.KILL: (0.0, 0.0),
    Hit.STOP: (0.05, 0.8),
    Hit.LONG_STOP: (2.0, 2.6),
    Hit.CUT: (0.05, 0.8),
}
_OTHERS_S = (0.3, 1.0)
_LONGEST_PAUSE_S = 0.6
_NUM_FAULTS = (1, 1, 1, 2, 2, 3)
_CANDIDATES = 60  # schedules that are compared for every one of a covering


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One fault."""

    target: Target
    hit: Hit
    phase: Phase
    pause_s: float = 0.0  # after the fault before has begun, beside the wait for the phase
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChaosSchedule:
    """Faults that one load has to survive."""

    seed: int
    faults: tuple[ChaosFault, ...]


Pair = tuple[enum.Enum, enum.Enum]


def make_schedule(seed: int) -> ChaosSchedule:
    """Make the schedule of this seed: one to three faults."""
    rng = random.Random(f"chaos/{seed}")
    return ChaosSchedule(seed, tuple(_fault(rng) for _ in range(rng.choice(_NUM_FAULTS))))


def _fault(rng: random.Random) -> ChaosFault:
    target = rng.choice(list(Target))
    hit = rng.choices(list(Hit), [_WEIGHTS.get(one, 1) for one in Hit])[0]
    return _timed(rng, target, hit, rng.choice(list(Phase)))


def _timed(rng: random.Random, target: Target, hit: Hit, phase: Phase) -> ChaosFault:
    duration_s = rng.uniform(*_DURATIONS_S.get(hit, _OTHERS_S))
    return ChaosFault(target, hit, phase, round(rng.uniform(0.0, _LONGEST_PAUSE_S), 3), round(duration_s, 3))


def pairs_of(fault: ChaosFault) -> frozenset[Pair]:
    return frozenset({(fault.target, fault.hit), (fault.target, fault.phase), (fault.hit, fault.phase)})


def all_pairs() -> frozenset[Pair]:
    hits = set(itertools.product(Target, Hit))
    return frozenset({*hits, *itertools.product(Target, Phase), *itertools.product(Hit, Phase)})


def covering(count: int, seed: int = 0) -> tuple[ChaosSchedule, ...]:
    """Return `count` schedules that have every possible pair in at least one of them.

    Each has as many faults as that takes, at most five. Raises ValueError where `count` is too small.
    """
    faults = _covering_faults(random.Random(f"covering/{seed}"))
    most = -(-len(faults) // count)
    if most > 5:
        raise ValueError(f"{len(faults)} faults do not fit into {count} schedules")
    return tuple(ChaosSchedule(number, tuple(faults[number::count])) for number in range(min(count, len(faults))))


def _covering_faults(rng: random.Random) -> list[ChaosFault]:
    missing, chosen = set(all_pairs()), []
    while missing:
        begun = min(missing, key=lambda pair: (str(pair[0]), str(pair[1])))  # so that every turn covers one
        candidates = [_with_pair(rng, begun) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda fault: len(pairs_of(fault) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    rng.shuffle(chosen)
    return chosen


def _with_pair(rng: random.Random, pair: Pair) -> ChaosFault:
    target, hit, phase = rng.choice(list(Target)), rng.choice(list(Hit)), rng.choice(list(Phase))
    for one in pair:
        target = one if isinstance(one, Target) else target
        hit = one if isinstance(one, Hit) else hit
        phase = one if isinstance(one, Phase) else phase
    return _timed(rng, target, hit, phase)


def shrink(schedule: ChaosSchedule, fails: Callable[[ChaosSchedule], bool]) -> ChaosSchedule:
    """Return the shortest schedule that still fails: first fewer faults, then shorter times, then a simpler phase.

    `fails` runs a schedule. The result fails; nothing left out of it alone makes it pass.
    """
    shortest = replace(schedule, faults=_fewest(schedule.faults, lambda faults: fails(_with(schedule, faults))))
    for index in range(len(shortest.faults)):
        for simpler in _simpler(shortest.faults[index]):
            faults = (*shortest.faults[:index], simpler, *shortest.faults[index + 1 :])
            if fails(_with(shortest, faults)):
                shortest = _with(shortest, faults)
                break
    return shortest


def _fewest(faults: tuple[ChaosFault, ...], fails: Callable[[tuple[ChaosFault, ...]], bool]) -> tuple[ChaosFault, ...]:
    size = max(len(faults) // 2, 1)
    while len(faults) > 1:
        rest = next((rest for rest in _without_one_part(faults, size) if fails(rest)), None)
        if rest is not None:
            faults, size = rest, max(min(size, len(rest) // 2), 1)
        elif size == 1:
            break
        else:
            size //= 2
    return faults


def _without_one_part(faults: tuple[ChaosFault, ...], size: int) -> Iterable[tuple[ChaosFault, ...]]:
    return (rest for start in range(0, len(faults), size) if (rest := (*faults[:start], *faults[start + size :])))


def _simpler(fault: ChaosFault) -> Sequence[ChaosFault]:
    shortest_s = _DURATIONS_S.get(fault.hit, _OTHERS_S)[0]
    options = [
        replace(fault, pause_s=0.0, duration_s=shortest_s),
        replace(fault, pause_s=0.0),
        replace(fault, duration_s=shortest_s),
    ]
    return [one for one in options if one != fault]


def _with(schedule: ChaosSchedule, faults: tuple[ChaosFault, ...]) -> ChaosSchedule:
    return replace(schedule, faults=faults)
