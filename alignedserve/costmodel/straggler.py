"""How long decodes wait for the longest context: what a kernel's attention costs, from a few timed decodes.

seconds of decode attention = k * max(sum of the contexts, c * longest context)
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from alignedserve.costmodel.iteration_points import Point
from alignedserve.costmodel.linear import Sample
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
_DOUBT = "short contexts took %.3g s, as many equal ones %.3g, mixed ones %.3g, one long context alone %.3g"
_MOST_BALANCED = 1.5  # times the attention of equal contexts: long ones may be in no cache of a processor


class Straggler(NamedTuple):
    """Price of a key, and the delay by the longest context."""

    key_s: float = 0.0  # k, of a key that is read
    share: float = 0.0  # c: shares of the device that the longest context cannot use; 0 also where nothing is known
    doubt: str = ""  # why times were not believed


def straggler_of(
    short: float, equal: float, mixed: float, alone: float, *, num_keys: int, short_keys: int, longest: int
) -> Straggler:
    """Return what the seconds of four iterations say: equal and mixed contexts of one number and sum (`num_keys`), as
    many short ones, and one long context alone.

        k = (equal - short) / (num_keys - short_keys)
        c = (mixed - equal + k * num_keys) / (k * longest)

    Example: 44 000 keys more take 11 ms instead of 10 (k 23 ns); among 48 000 keys one context of 8 192 makes that
    35 ms: as many as 1.1 million keys, so that c is 135. Times that differ by a tenth are alike.
    """
    seconds = (short, equal, mixed, alone)
    is_sound = all(math.isfinite(taken) and taken > 0.0 for taken in seconds)
    if not is_sound or mixed * _CONTRARY < equal or alone > mixed * _CONTRARY:
        return Straggler(doubt=_DOUBT % seconds)
    key_s = max(equal - short, 0.0) / (num_keys - short_keys)
    attention_s = mixed - equal + key_s * num_keys
    if mixed <= equal * _DEARER or attention_s <= _MOST_BALANCED * key_s * num_keys:
        return Straggler(key_s)
    if equal < short * _VISIBLE:
        return Straggler(doubt=_DOUBT % seconds)
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


def straggler_in(samples: Iterable[Sample]) -> Straggler:
    """Return what samples say that have `straggler_points` among them. The quickest of each point counts: whatever else
    a machine does only prolongs an iteration."""
    best: dict[tuple[int, int, int], float] = {}
    for work, seconds in samples:
        if 0 < work.num_decodes == work.num_tokens and not work.hidden_context_len:
            kind = (work.num_decodes, work.decode_context_len, work.max_decode_context_len)
            best[kind] = min(seconds, best.get(kind, math.inf))
    for number, num_keys, longest in sorted(best, reverse=True):
        short_keys, mean = number * _SHORT, -(-num_keys // number)
        mixed, alone = (number, num_keys, longest), (1, longest, longest)
        kinds = ((number, short_keys, _SHORT), (number, num_keys, mean), mixed, alone)
        if longest > mean and all(kind in best for kind in kinds):
            lengths = {"num_keys": num_keys, "short_keys": short_keys, "longest": longest}
            return straggler_of(*(best[kind] for kind in kinds), **lengths)
    return Straggler()
