"""How long decodes wait for the longest context: what a kernel's attention costs, from a few timed decodes.

seconds of decode attention = k * max(sum of the contexts, c * longest context)
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from alignedserve.costmodel.iteration_points import Point
from alignedserve.costmodel.work import IterationWork

_LEAST_DECODES, _MOST_DECODES = 16, 128
_LEAST_LONG, _MOST_LONG = 1024, 8192  # tokens of a context
_NUM_LONG = 2
_SHORTER = 32  # times as short as a long context
_SHORT = 16  # tokens of contexts that cost next to nothing
_FULLEST = 0.9  # of the memory
_SPARE = 16  # tokens by which every context may grow
_DEARER, _VISIBLE = 1.1, 1.03  # times as long: less is noise; of attention in a whole iteration
_CONTRARY = 1.3  # likewise, the wrong way round
_MOST_BALANCED = 1.5  # times the attention of equal contexts: long ones may be in no cache of a processor


class Straggler(NamedTuple):
    """`key_s` is k, of a key that is read. `share` is c: shares of the device that the longest context cannot use."""

    key_s: float = 0.0
    share: float = 0.0  # 0: the kernel divides every context evenly, or nothing is known
    doubt: str = ""  # why the times were not believed


class DecodeSeconds(NamedTuple):
    """Times of decodes whose contexts are the same number and sum, and of two to tell them by."""

    short: float  # as many decodes with contexts of next to nothing
    equal: float
    mixed: float  # a few long contexts among short ones
    alone: float  # one of the long ones


def straggler_of(seconds: DecodeSeconds, *, num_keys: int, short_keys: int, longest: int) -> Straggler:
    """Return what the times of four iterations say. `num_keys`: of equal and of mixed contexts; `short_keys`: of short.

        k = (equal - short) / (num_keys - short_keys)
        c = (mixed - (equal - k * num_keys)) / (k * longest)

    Example: 44 000 keys more take 11 ms instead of 10 (k 23 ns); among 48 000 keys one context of 8 192 makes that
    35 ms: as many as 1.1 million keys, so that c is 135. Times that differ by a tenth are alike.
    """
    if not all(math.isfinite(taken) and taken > 0.0 for taken in seconds):
        return Straggler(doubt=f"decodes of {tuple(seconds)} s")
    short, equal, mixed, alone = seconds
    if mixed * _CONTRARY < equal:
        return Straggler(doubt=f"mixed contexts took {mixed:.3g} s, equal ones {equal:.3g} s")
    if alone > mixed * _CONTRARY:
        return Straggler(doubt=f"a context alone took {alone:.3g} s, among others {mixed:.3g} s")
    key_s = max(equal - short, 0.0) / (num_keys - short_keys)
    attention_s = mixed - equal + key_s * num_keys
    if mixed <= equal * _DEARER or attention_s <= _MOST_BALANCED * key_s * num_keys:
        return Straggler(key_s)
    if equal < short * _VISIBLE:
        return Straggler(doubt=f"mixed contexts took {mixed:.3g} s, equal and short ones {equal:.3g} s")
    return Straggler(key_s, attention_s / (key_s * longest))


def straggler_points(*, max_requests: int, max_context_len: int, num_tokens: int) -> list[Point]:
    """Return the decodes to time, within a worker's limits; none where they would show nothing.

    `num_tokens`: that its memory holds.
    """
    num_decodes = min(_MOST_DECODES, max_requests)
    sum_of_long = _NUM_LONG + (num_decodes - _NUM_LONG) / _SHORTER  # contexts
    longest = min(_MOST_LONG, max_context_len - _SPARE, int(_FULLEST * num_tokens / sum_of_long))
    if longest < _LEAST_LONG or num_decodes < _LEAST_DECODES:
        return []
    mixed = (longest // _SHORTER,) * (num_decodes - _NUM_LONG) + (longest,) * _NUM_LONG
    mean, rest = divmod(sum(mixed), num_decodes)
    equal = (mean + 1,) * rest + (mean,) * (num_decodes - rest)
    return [Point("straggler", contexts=lengths) for lengths in ((_SHORT,) * num_decodes, equal, mixed, (longest,))]


def is_alone(work: IterationWork) -> bool:
    return work.num_decodes == work.num_tokens == 1 and work.max_decode_context_len >= _LEAST_LONG


def straggler_in(samples: Iterable[tuple[IterationWork, float]]) -> Straggler:
    """Return what timed iterations say, with those of `straggler_points` among them. The quickest of each kind counts,
    as what else a machine does only prolongs it."""
    best: dict[tuple[int, int, int], float] = {}
    for work, seconds in samples:
        if 0 < work.num_decodes == work.num_tokens and not work.hidden_context_len:
            kind = (work.num_decodes, work.decode_context_len, work.max_decode_context_len)
            best[kind] = min(seconds, best.get(kind, math.inf))
    for number, num_keys, longest in sorted(best, reverse=True):
        short, equal = (number, number * _SHORT, _SHORT), (number, num_keys, -(-num_keys // number))
        alone = (1, longest, longest)
        if longest > equal[2] and all(kind in best for kind in (short, equal, alone)):
            seconds = DecodeSeconds(best[short], best[equal], best[number, num_keys, longest], best[alone])
            return straggler_of(seconds, num_keys=num_keys, short_keys=short[1], longest=longest)
    return Straggler()
