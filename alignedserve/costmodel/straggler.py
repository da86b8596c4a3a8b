"""How long decodes wait for the longest context: what a kernel's attention costs, from a few timed decodes.

seconds of decode attention = k * max(sum of the contexts, c * longest context)
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from alignedserve.costmodel.iteration_points import Point
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
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
_FAR = 8  # times as long as all contexts together
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


class Delay(NamedTuple):
    """What the longest context costs the decodes beside it, in seconds of each iteration."""

    even_len: int = 0  # tokens of the longest context that delays no other
    longer_token_s: float = 0.0  # for each further token; 0: the device divides contexts evenly


def delay_beside(here: IterationWork, costs: CostModel) -> Delay:
    """Return how contexts delay decodes with the tokens of `here`, all equal.

    Example: attention waits for 100 times the longest context. Beside 200 decodes of 1 000 tokens a context of 2 000
    delays none, and each token more costs as much as 100 keys.
    """
    among_short = IterationWork()
    among_short.add_decodes(_LEAST_DECODES, _LEAST_DECODES * _SHORT, _SHORT)
    if _joined_s(among_short, costs, _MOST_LONG) <= _DEARER * _evenly_s(among_short, costs, _MOST_LONG):
        return Delay()
    longest = max(_MOST_LONG, _FAR * here.decode_context_len)  # so long that it delays for certain
    joined_s = _joined_s(here, costs, longest)
    token_s = (joined_s - _joined_s(here, costs, longest // 2)) / (longest - longest // 2)
    delay_s = joined_s - _evenly_s(here, costs, 0)
    return Delay(max(longest - round(delay_s / token_s), 0) if token_s > 0.0 else longest, token_s)


def _joined_s(here: IterationWork, costs: CostModel, context_len: int) -> float:
    joined = here.copy()
    joined.max_decode_context_len = 0
    joined.add_decodes(1, context_len, context_len)
    return costs.iteration_s(joined)


def _evenly_s(here: IterationWork, costs: CostModel, num_tokens: int) -> float:
    """Return the seconds with another decode and so many tokens more, all contexts equal."""
    joined = here.copy()
    joined.add_decodes(1, num_tokens, 0)
    joined.max_decode_context_len = -(-joined.decode_context_len // joined.num_decodes)
    return costs.iteration_s(joined)
