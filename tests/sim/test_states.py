"""Simulated models whose large states have blocks of their own, in every topology."""

import pytest

from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.links import LinkModel
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.costmodel.profile_file import MachineProfile
from alignedserve.sim.policies import simulated_policy, with_policy
from alignedserve.sim.simulation import Simulation
from alignedserve.sim.sweep import WorkloadLine

SHAPE = ModelShape(
    "hybrid", 8, 512, 4, 4, 128, 256, 512, is_gated=False, ties_embeddings=True, dtype="float32",
    num_cached_layers=2, num_state_layers=6, state_layer_bytes=1 << 20,
)  # fmt: skip
COSTS = LinearCoefficients(base_s=0.01, prompt_token_s=1e-4, decode_s=1e-4)
SIZES = ("decode.count=2", "prefill.count=2", "decode.kv_cache_bytes=1GiB", "prefill.kv_cache_bytes=1GiB")
POOLS = ("pool.memory_bytes=1GiB", "prefill.candidate_buffer_bytes=512MiB")


@pytest.mark.parametrize("topology", list(Topology))
def test_every_request_ends(topology: Topology) -> None:
    """Also where answers may be as long as the memory allows, which states take a part of."""
    cluster = with_policy(with_fixed_sizes(load_config(None, (*SIZES, *POOLS))), "aligned_slo", topology=topology)
    config = simulated_policy(MachineProfile(SHAPE, COSTS, LinkModel(0.0, 1e9)), cluster)
    assert config.layout.state_blocks
    line = "prompt=uniform(100,1800), output=uniform(10,60), rate=6, cv=2, ttft=1.5, tpot=0.15"
    found = Simulation(config, WorkloadLine(line, 1, duration_s=10.0).build()).run().classes["all"]
    assert found.attainment == 1.0
