"""What a cluster, or one model of it, does now, in one line."""

from alignedserve.cli.console import counted
from alignedserve.config.sections import Topology
from alignedserve.core.metrics import in_percent
from alignedserve.messages.gateways import ClusterStatus


def load_line(load: ClusterStatus | None, topology: str) -> str:
    if load is None:
        return "Load: unknown, as no gateway has a router"
    pooled, workers = "", counted(load.num_decode_workers, f"{topology} worker")
    if topology == Topology.DISAGGREGATED.value:
        pooled = f"{load.num_pooled} pooled, "
        workers = f"{load.num_prefill_workers} prefill and {load.num_decode_workers} decode workers"
    if load.num_standby_workers:
        workers += f" ({load.num_standby_workers} standing by)"
    leans = "".join(f"; {lean.worker} leans {in_percent(lean.lean, 0)} to prompts" for lean in load.leans)
    prefixes = ""
    if load.prefixes.num_query_tokens:
        found = in_percent(load.prefixes.hit_rate, 0)
        prefixes = f"; prefix cache: {load.prefixes.num_blocks} blocks, {found} of tokens found"
    return (
        f"Load: {load.num_queued} queued, {load.num_prefilling} in prefill, {pooled}{load.num_decoding} decoding; "
        f"{workers}, {load.num_worker_blocks_used} of {load.num_worker_blocks} blocks used{prefixes}{leans}"
    )
