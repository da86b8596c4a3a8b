"""How the router's logic is put together from its configuration, alike for the live router and the simulated one."""

from alignedserve.config.sections import BatchingConfig, RouterConfig
from router.logic import RouterLogic
from router.policies import make_prefill_order
from router.policies.bypass import DirectHandoff, UrgentBypass


def make_logic(*, config: RouterConfig, batching: BatchingConfig) -> RouterLogic:
    """Raises ConfigError naming the field when a policy does not exist. What is unset is as `aligned_slo` has it."""
    return RouterLogic(
        config=config,
        batching=batching,
        order=make_prefill_order(config.prefill_order or "least_slack"),
        bypass=DirectHandoff() if config.direct_handoff else UrgentBypass(),
    )
