"""Simulated models whose large states, or windows, have blocks of their own, in every topology."""

import pytest

from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.model_shapes import ModelShape
from lab.costmodel.profile_file import MachineProfile
from lab.sim.policies import simulated_policy, with_policy
from lab.sim.simulation import Simulation
from lab.sim.sweep import WorkloadLine

SHAPE = ModelShape(
    "hybrid", 8, 512, 4, 4, 128, 256, 512, is_gated=False, ties_embeddings=True, dtype="float32",
    num_cached_layers=2, num_state_layers=6, state_layer_bytes=1 << 20,
)  # fmt: skip
WINDOWS = ModelShape(
    "windows", 8, 512, 4, 4, 128, 256, 512, is_gated=False, ties_embeddings=True, dtype="float32",
    num_windowed_layers=6, window=128,
)  # fmt: skip
COSTS = LinearCoefficients(base_s=0.01, prompt_token_s=1e-4, decode_s=1e-4)
SIZES = ("decode.count=2", "prefill.count=2", "decode.kv_cache_bytes=1GiB", "prefill.kv_cache_bytes=1GiB")
POOLS = ("pool.memory_bytes=1GiB", "prefill.candidate_buffer_bytes=512MiB")


@pytest.mark.parametrize("shape", [SHAPE, WINDOWS])
@pytest.mark.parametrize("topology", list(Topology))
def test_every_request_ends(topology: Topology, shape: ModelShape) -> None:
    """Also where answers may be as long as the memory allows, which states take a part of."""
    sizes = (*SIZES, *POOLS, "engine.window_cache=ring")
    cluster = with_policy(with_fixed_sizes(load_config(None, sizes)), "aligned_slo", topology=topology)
    config = simulated_policy(MachineProfile(shape, COSTS, LinkModel(0.0, 1e9)), cluster)
    assert config.layout.state_blocks
    line = "prompt=uniform(100,1800), output=uniform(10,60), rate=6, cv=2, ttft=1.5, tpot=0.15"
    found = Simulation(config, WorkloadLine(line, 1, duration_s=6.0).build()).run().classes["all"]
    assert found.attainment == 1.0


def test_windows_have_rings_where_they_pay() -> None:
    """By default on processors; on accelerators where it is asked for, as their kernels have none yet."""
    settings = (*SIZES, *POOLS, "model.max_context_len=8000")

    def layout(num_threads: int | None, *more: str) -> BlockLayout:
        profile = MachineProfile(WINDOWS, COSTS, LinkModel(0.0, 1e9), num_threads=num_threads)
        return simulated_policy(profile, with_fixed_sizes(load_config(None, (*settings, *more)))).layout

    assert layout(2).ring_layers == 6
    assert layout(None).ring_layers == 0
    assert layout(None, "engine.window_cache=ring") == layout(2)
    assert layout(2, "engine.window_cache=whole") == layout(None)
    assert layout(2).bytes_of(8000) < 0.4 * layout(None).bytes_of(8000)
