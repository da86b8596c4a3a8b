"""Checks of a simulation before it begins, instead of failures an hour into it."""

from collections.abc import Collection, Sequence
from itertools import chain

from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.factory import check_yielding
from alignedserve.scheduling.policies import require_policy
from alignedserve.scheduling.policy import Mechanism
from lab.sim.config import SimConfig, SimWorkerLoss
from lab.workload.requests import Workload, turns_of


def check_fit(config: SimConfig, workload: Workload) -> None:
    """Raise ConfigError for a request that could never be served as it is; live it would fail or be cut short.

    One with a limit of its own is to fit a decode worker's memory at its longest; one without, the context.
    """
    for number, first in enumerate(workload.requests):
        for timed in turns_of(first):
            if timed.max_tokens is None:
                holds, words, limit = timed.final_context_len, "comes to hold", config.max_context_len
            else:
                holds, words, limit = timed.prompt_len + timed.max_tokens, "may come to hold", config.memory_tokens
            if holds > limit:
                what = "a decode worker's memory holds" if limit == config.memory_tokens else "the model's context is"
                raise ConfigError(f"request {number} of the workload {words} {holds} tokens; {what} {limit}")


def check_losses(losses: Sequence[SimWorkerLoss], workers: Collection[str]) -> None:
    """Raise ConfigError if a loss names an unknown worker, or a worker twice."""
    names = [loss.worker for loss in losses]
    for name in names:
        if name not in workers or names.count(name) > 1:
            known = ", ".join(workers)
            raise ConfigError(f"losses: {name} is lost twice or no worker of this cluster; it has {known}")


def check_policy(config: SimConfig, workload: Workload) -> None:
    """Raise ConfigError if a policy needs true predictions and has none; predictions of closed loops count as true."""
    turns = chain.from_iterable(map(turns_of, workload.requests))
    are_known = all(timed.predicted_len == timed.output_len for timed in turns)
    known = frozenset({Mechanism.KNOWN_LENGTHS}) if are_known else frozenset()
    scheduling, topology = config.cluster.scheduling, config.cluster.chosen_topology
    require_policy(scheduling, topology, config.available | known)
    check_yielding(scheduling, topology, config.available)
