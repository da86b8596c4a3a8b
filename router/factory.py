"""Builds the router's logic from its configuration, for the live router and the simulated one."""

from alignedserve.config.sections import BatchingConfig, RouterConfig
from router.logic import RouterLogic
from router.moves.far_moves import FarLeans
from router.moves.leans import Leans
from router.placement import Placement
from router.policies import make_prefill_order
from router.policies.bypass import Bypass, DirectHandoff, PackedBypass, UrgentBypass


def make_logic(*, config: RouterConfig, batching: BatchingConfig) -> RouterLogic:
    """Build the logic; what is unset defaults to `aligned_slo`. Raises ConfigError naming the field."""
    placement = Placement(max_candidate_requests=config.max_candidate_requests, batching=batching)
    return RouterLogic(
        config=config,
        placement=placement,
        order=make_prefill_order(config.prefill_order or "least_slack"),
        bypass=_bypass(config, batching),
        leans=FarLeans(placement.links) if config.moves_between_nodes else Leans(),
    )


def _bypass(config: RouterConfig, batching: BatchingConfig) -> Bypass:
    if config.direct_handoff:
        return DirectHandoff()
    return UrgentBypass() if batching.pack_share is None else PackedBypass()
