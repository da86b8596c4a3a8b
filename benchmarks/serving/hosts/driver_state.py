"""Cost for the driver of keeping its state for the next one, by the number of nodes.

    python -m benchmarks.serving.hosts.driver_state

`look_ms`: to write the record once a second, which shows that nothing has changed; `read_ms`: for the next driver to
read it; medians of runs on one thread. `given_mib`: what one handover gives to the keepers of all nodes together;
`heartbeat_kib`: what they get in a second without a change, without what Ray puts around a call.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from alignedserve.cluster.actor_factory import ClusterSecrets, PreparedNode
from alignedserve.cluster.hosts.admission import Keeper
from alignedserve.cluster.hosts.handover import ClusterState, decode, encode
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.models.hosted import HostedModel
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.plan import NodeResources, plan_cluster
from alignedserve.cluster.hosts.ray_directory import RayDirectory
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.config.sections import MIB, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.process.addresses import AddressBook
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.model.served_model import resolve_model
from benchmarks.support.recording import write_result

NUM_NODES = (3, 10, 100, 1000)
_MACHINE = Machine(8192 * MIB, 4096 * MIB, 4, False)
_NUMBER_BYTES = 8


def state_of(num_nodes: int) -> ClusterState:
    """Return the state of a cluster with so many nodes, none of whose processes exist."""
    nodes = [
        RayNode(f"{index:056x}", f"10.{index >> 8}.{index & 255}.1", f"host{index}", is_head=not index)
        for index in range(num_nodes)
    ]
    found = [NodeResources(NodeCapacity(f"node-{index}", one.address, 4), _MACHINE) for index, one in enumerate(nodes)]
    plan = plan_cluster(from_mapping({}), resolve_model(ModelSectionConfig()), found)
    members = []
    for node, resources, share in zip(nodes, found, plan.shares, strict=True):
        book = AddressBook(Path("/tmp") / f"alignedserve-c-{share.node}", node.node_id, node.address, RayDirectory("c"))
        prepared = PreparedNode(share, resources.capacity, plan.config_of(share, node.address), book)
        members.append(Member(node, prepared, Keeper(None, book)))
    joining = Joining(plan, {"": HostedModel(plan, {}, None)}, "c", num_nodes)
    return ClusterState("asked", 0.0, ClusterSecrets(authority=CertificateAuthority.new("c")), joining, tuple(members))


def measure(num_nodes: int, num_runs: int) -> dict[str, Any]:
    """Return one row of the result."""
    state = state_of(num_nodes)
    look_s, read_s = [], []
    size = 0
    for _ in range(num_runs):
        begin = time.perf_counter()
        record = encode(state)
        looked = time.perf_counter()
        decode(record)
        read_s.append(time.perf_counter() - looked)
        look_s.append(looked - begin)
        size = len(record)
    return {
        "nodes": num_nodes,
        "look_ms": round(statistics.median(look_s) * 1e3, 2),
        "read_ms": round(statistics.median(read_s) * 1e3, 2),
        "state_kib": round(size / 1024, 1),
        "given_mib": round(size * num_nodes / MIB, 1),
        "heartbeat_kib": round(_NUMBER_BYTES * num_nodes / 1024, 2),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    rows = []
    for num_nodes in NUM_NODES:
        rows.append(measure(num_nodes, arguments.runs))
        print(rows[-1], flush=True)
    write_result("driver_state", rows)


if __name__ == "__main__":
    main()
