"""Where `accelgen` holds its objectives and where not: chat beside documents, simulated on machines of many speeds.

    python -m benchmarks.simulation.accelgen_edge [--duration S]

The load and settings of benchmarks.scheduling.live_policies, one colocated worker of a 125M OPT shape, whose costs are
a straight line times a factor; policies learn them, or know them.
"""

import argparse
from typing import Any

import msgspec

from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.links import LinkModel
from alignedserve.sim.config import SimConfig, SimLinks
from alignedserve.sim.policies import with_policy
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.build import build_workload
from alignedserve.workload.catalogue import Library
from benchmarks.scheduling.live_policies import BEST_EFFORT, REAL_TIME, SETTINGS
from benchmarks.support.recording import write_result

COSTS = LinearCoefficients(
    base_s=0.006, prompt_token_s=3e-4, prompt_pair_s=1e-8, chunk_s=5e-4, decode_s=3e-4, context_token_s=5e-7
)
FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.5)
POLICIES = ("accelgen", "bros", "aligned_slo")
LAYOUT = BlockLayout(16, 12, 12, 64, "bfloat16")
MEMORY = LinkModel(1e-5, 8e9)


def held(policy: str, factor: float, *, learns_costs: bool, duration_s: float) -> dict[str, Any]:
    """Return the share of real-time requests that hold both objectives, and the documents that end."""
    cluster = with_policy(load_config(None, [*SETTINGS, "topology=colocated"]), policy, topology=Topology.COLOCATED)
    cluster = msgspec.structs.replace(cluster, decode=msgspec.structs.replace(cluster.decode, count=1))
    costs = LinearIterationModel(LinearCoefficients.of([factor * weight for weight in COSTS.weights], 0.0), 4e-6)
    config = SimConfig(
        cluster, LAYOUT, SimLinks(MEMORY, MEMORY, 6e-4), costs, learns_costs=learns_costs, context_len=2048
    )
    workload = build_workload(f"{REAL_TIME}; {BEST_EFFORT}", seed=0, library=Library(), duration_s=duration_s)
    classes = Simulation(config, workload).run().classes
    return {"held": classes["rt"].attainment, "documents_per_s": classes["be"].loaded_requests_per_s}


def main() -> None:
    """Print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=40.0)
    duration_s = parser.parse_args().duration
    figures: dict[str, Any] = {"duration_s": duration_s, "coefficients": list(COSTS.weights)}
    for policy in POLICIES:
        for factor in FACTORS:
            for learns_costs in (True, False) if policy == "accelgen" else (True,):
                name = f"{policy}, {factor}, {'learned' if learns_costs else 'known'}"
                figures[name] = held(policy, factor, learns_costs=learns_costs, duration_s=duration_s)
                print(name, figures[name], flush=True)
    print(write_result("accelgen_edge", figures))


if __name__ == "__main__":
    main()
