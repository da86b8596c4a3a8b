"""The sizes of a cluster of logics (logic_cluster.py)."""

from dataclasses import dataclass, field

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, RouterConfig, SchedulingConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of the system under test."""

    num_nodes: int = 1  # workers are on them in turn; each has a pool
    num_prefill: int = 1
    num_decode: int = 1
    is_colocated: bool = False
    is_elastic: bool = False  # colocated workers that hand requests over
    pool_blocks: int = 40
    worker_blocks: int = 30
    buffer_blocks: int = 16
    max_running_requests: int = 6
    min_requests: int = 3
    policy: str = "density_first"
    scheduling: str = "fcfs"  # policy of colocated workers
    settings: tuple[tuple[str, str], ...] = ()  # of that policy
    host_tokens: int = 0
    hidden_ratio: float | None = None
    disaggregated_scheduling: SchedulingConfig = field(default_factory=lambda: SchedulingConfig(policy="aligned"))
    pack_share: float | None = None  # of separate workers: slack is packed
    refuse: float = 0.0
    direct_handoff: bool | None = None
    has_prefix_cache: bool = False
    prefix_pool_blocks: int = 0  # of each node's pool, under colocated workers
    yields: bool = False  # passes of colocated workers stop between layers, and begin at little cost
    decode_pool_blocks: int = 0  # the same, for decodes that wait there
    state_blocks: int = 0  # of each request, for its states
    gateway_beside: str = ""  # the pool of its node; empty: it is on no node of a worker

    @property
    def node_pool_blocks(self) -> int:
        """Return the blocks of each node's pool."""
        return self.prefix_pool_blocks + self.decode_pool_blocks or self.pool_blocks

    @property
    def router(self) -> RouterConfig:
        """Return the router's section."""
        return RouterConfig(
            max_queued_requests=200, max_retries=50, max_candidate_requests=4, direct_handoff=self.direct_handoff
        )

    @property
    def batching(self) -> BatchingConfig:
        """Return the batching section of router, pool and decode workers."""
        return BatchingConfig(
            policy=self.policy, min_requests=self.min_requests, starvation_s=0.3, pack_share=self.pack_share
        )

    @property
    def decode(self) -> DecodeWorkerConfig:
        """Return the limits of decode and colocated workers; the latter hold four times as many as an iteration."""
        return DecodeWorkerConfig(
            max_running_requests=self.max_running_requests,
            max_num_batched_tokens=12,
            max_waiting_requests=3 * self.max_running_requests,
        )
