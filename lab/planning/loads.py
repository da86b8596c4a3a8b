"""Loads of a workload, estimated by a cost model: seconds of a worker that prompts and answers take.

They choose the windows that are simulated and the plans that a search begins with, and decide nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from alignedserve.costmodel.work import IterationWork
from lab.planning.candidates import Family
from lab.sim.config import SimConfig
from lab.workload.requests import TimedRequest


class Load(NamedTuple):
    """Seconds of workers."""

    prompts_s: float
    answers_s: float

    @property
    def total_s(self) -> float:
        return self.prompts_s + self.answers_s


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """The cost of a token: of a prompt in a full chunk, of an answer in the largest batch that keeps its pace."""

    prompt_token_s: float
    answer_token_s: float

    def of(self, requests: Sequence[TimedRequest]) -> Load:
        return Load(
            self.prompt_token_s * sum(request.prompt_len for request in requests),
            self.answer_token_s * sum(request.output_len for request in requests),
        )


def unit_costs(config: SimConfig, requests: Sequence[TimedRequest]) -> UnitCosts:
    decode = config.cluster.decode
    section = decode if config.is_colocated else config.cluster.prefill
    chunk = IterationWork()
    chunk.add_chunk(section.max_num_batched_tokens, 0, is_last=True)
    prompt_costs = config.prefill_costs or config.decode_costs
    context_len = max(
        sum(request.prompt_len + request.output_len // 2 for request in requests) // max(len(requests), 1), 1
    )
    pace_s = min((request.slo.tpot_s for request in requests if request.slo.tpot_s is not None), default=inf)
    size = max(min(decode.max_running_requests, config.memory_tokens // context_len), 1)
    while size > 1 and _decode_s(config, size, context_len) > pace_s:
        size //= 2
    return UnitCosts(
        prompt_costs.iteration_s(chunk) / section.max_num_batched_tokens,
        _decode_s(config, size, context_len) / size,
    )


def _decode_s(config: SimConfig, size: int, context_len: int) -> float:
    work = IterationWork()
    work.add_decodes(size, size * context_len, context_len)
    return config.decode_costs.iteration_s(work)


def first_member(family: Family, load: Load, duration_s: float) -> int:
    """Return the member whose workers are about enough for a load that comes in this time: one to begin a search with.

    Where its prefill workers are too few the last one, as none of the family can hold.
    """
    first = family.members[0]
    is_separate = first.topology.is_separate
    if is_separate and load.prompts_s > first.num_prefill * duration_s:
        return len(family.members) - 1
    needed = ceil((load.answers_s if is_separate else load.total_s) / max(duration_s, 1e-9))
    enough = (index for index, member in enumerate(family.members) if member.num_decode >= needed)
    return next(enough, len(family.members) - 1)
