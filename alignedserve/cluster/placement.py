"""Places a cluster's processes on its nodes: a pure plan, by what each node has.

Every node has workers, whose counts follow from its cores or GPUs, unless configured: then the configured total is
shared out. The first node is the head: it has the router and the driver of batches as well. Where prompts and decodes
have workers of their own, every node with workers has a KV pool, and a prefill worker needs a decode worker beside it,
which takes batches of their pool.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from alignedserve.config.sections import ClusterConfig, EngineConfig
from alignedserve.config.unset_sizes import DefaultSize
from alignedserve.core.errors import ConfigError
from alignedserve.process.addresses import FIRST_DEPLOYMENT, ROUTER, deployed_name, stage_name


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node, and what it has for workers."""

    name: str  # node-0 is the head
    address: str  # two nodes may be on one host, whose ports they share
    num_cores: int
    gpus: tuple[str, ...] = ()  # devices that workers use; none: they compute on the CPU

    @property
    def weight(self) -> int:
        return len(self.gpus) or self.num_cores


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The processes of one node."""

    node: str
    pool_name: str
    prefill: tuple[str, ...] = ()  # names of its workers
    decode: tuple[str, ...] = ()
    gateways: tuple[tuple[str, int], ...] = ()  # with their ports
    is_head: bool = False
    deployment_id: str = FIRST_DEPLOYMENT  # of the model that its workers serve
    num_standby: int = 0  # of its decode workers, whichever has no work
    has_model: bool = True  # False: the deployment has ended, and only the gateways and what else is shared are left
    stages: tuple[str, ...] = ()  # names of stages of workers of other nodes

    @property
    def router(self) -> str:
        return deployed_name(ROUTER, self.deployment_id)

    @property
    def num_workers(self) -> int:
        """Return how many workers share its cores or GPUs; standbys do not count, as they do nothing."""
        return len(self.prefill) + len(self.decode) - self.num_standby

    def with_worker(self, kind: str, name: str) -> "NodeShare":
        """Return the share with one worker more: `prefill` or `decode`."""
        prefill, decode = ((name,) if kind == role else () for role in ("prefill", "decode"))
        return replace(self, prefill=(*self.prefill, *prefill), decode=(*self.decode, *decode))

    def without(self, names: Collection[str]) -> "NodeShare":
        prefill, decode = (tuple(name for name in kind if name not in names) for kind in (self.prefill, self.decode))
        return replace(self, prefill=prefill, decode=decode)

    def without_model(self) -> "NodeShare":
        return replace(self, prefill=(), decode=(), num_standby=0, has_model=False, stages=())

    @property
    def workers(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    def config_of(self, config: ClusterConfig) -> ClusterConfig:
        counts = {
            "prefill": len(self.prefill),
            "decode": len(self.decode) - self.num_standby,
            "gateway": len(self.gateways),
        }
        return msgspec.structs.replace(
            config,
            **{
                name: msgspec.structs.replace(getattr(config, name), count=max(count, 1))
                for name, count in counts.items()
            },
        )


@dataclass(slots=True)
class PlacedCounts:
    """How much of a deployment has been placed, so that names and ports are given once and never again."""

    num_nodes: int = 0
    num_named: dict[str, int] = field(default_factory=dict)  # by kind
    num_ports: dict[str, int] = field(default_factory=dict)  # gateways by address


class DeploymentPlacement:
    """Shares a deployment out over the nodes of its cluster; more nodes may join later. The gateways, which serve all
    deployments, are placed with the first."""

    def __init__(
        self, config: ClusterConfig, deployment_id: str = FIRST_DEPLOYMENT, counts: PlacedCounts | None = None
    ) -> None:
        """`config`: with its topology chosen; counts that are unset follow the nodes. `counts`: of a former driver's
        placement, to go on with."""
        self._config = config
        self.deployment_id = deployment_id
        self._is_separate = config.chosen_topology.is_separate
        self.counts = counts or PlacedCounts()
        self.spans_hosts = False  # the stages of a worker are on as many nodes

    def place(self, nodes: Sequence[NodeCapacity], room: Mapping[str, int] | None = None) -> list[NodeShare]:
        """Share everything out over the first nodes of the cluster, the head first. `room`: the nodes that may have
        workers, with how many of other deployments they have; None: all, with none."""
        able = [index for index, node in enumerate(nodes) if room is None or node.name in room]
        groups = self._groups(able)
        able = [group[0] for group in groups]
        taken = [room.get(nodes[index].name, 0) if room is not None else 0 for index in able]
        prefill, decode = self._worker_counts([nodes[index] for index in able], taken)
        placed = dict(zip(able, zip(prefill, decode, strict=True), strict=True))
        wanted = self._config.gateway.count
        gateways = (
            [1] * len(nodes)
            if isinstance(wanted, DefaultSize)
            else [wanted // len(nodes) + (index < wanted % len(nodes)) for index in range(len(nodes))]
        )
        shares = [
            self._share(node, *placed.get(index, (0, 0)), num_gateways)
            for index, (node, num_gateways) in enumerate(zip(nodes, gateways, strict=True))
        ]
        for first, *others in groups:
            for stage, index in enumerate(others, 1):
                shares[index] = replace(shares[index], stages=(stage_name(shares[first].decode[0], stage),))
        return shares

    def _groups(self, able: Sequence[int]) -> list[tuple[int, ...]]:
        size, count = self._config.engine.pipeline_parallel, _set_count(self._config.decode.count)
        self.spans_hosts = size > 1 and len(able) > 1
        if not self.spans_hosts:
            return [(index,) for index in able]
        problem = None
        if len(able) < size:
            problem = f"there are {len(able)} nodes for its stages; set it to {len(able)}, or start as many nodes"
        elif self._is_separate:
            problem = "separate workers hand over blocks, of which stages on hosts have parts; leave topology out"
        elif count is not None and count != len(able) // size:
            problem = f"{len(able)} nodes make {len(able) // size} workers of so many stages; leave decode.count out"
        elif self._pool_setting() is not None:
            problem = f"stages on several hosts have parts of blocks, and {self._pool_setting()} keeps whole ones"
        elif self._config.decode.standby:
            problem = "stages on several hosts have no standby; leave decode.standby out"
        if problem is not None:
            raise ConfigError(f"engine.pipeline_parallel is {size}, but {problem}")
        return [tuple(able[first : first + size]) for first in range(0, len(able) - size + 1, size)]

    def _pool_setting(self) -> str | None:
        host_bytes = self._config.prefix_cache.host_bytes
        if host_bytes and not isinstance(host_bytes, DefaultSize):
            return "prefix_cache.host_bytes"
        return "decode.pool_bytes" if self._config.decode.pool_bytes else None

    def join(self, node: NodeCapacity) -> NodeShare:
        """Give a joining node the workers that follow from its resources; configured counts are placed already. Raises
        ConfigError as `first_gpus` does."""
        prefill = decode = 0
        if self.spans_hosts:  # a worker takes several nodes, which are there from the start
            return self._share(node, 0, 0, int(isinstance(self._config.gateway.count, DefaultSize)))
        sections = (self._config.prefill, self._config.decode) if self._is_separate else (self._config.decode,)
        if all(isinstance(section.count, DefaultSize) for section in sections):
            prefill, decode = _default_counts(node, self._config.engine.tensor_parallel, is_separate=self._is_separate)
        return self._share(node, prefill, decode, int(isinstance(self._config.gateway.count, DefaultSize)))

    def _worker_counts(self, nodes: Sequence[NodeCapacity], taken: Sequence[int]) -> tuple[list[int], list[int]]:
        defaults = [
            _default_counts(node, self._config.engine.tensor_parallel, is_separate=self._is_separate) for node in nodes
        ]
        if not self._is_separate:
            total = _set_count(self._config.decode.count)
            counts = [count for _, count in defaults] if total is None else _by_weight(total, nodes, taken)
            return [0] * len(nodes), counts
        totals = [_set_count(self._config.prefill.count), _set_count(self._config.decode.count)]
        limit = min((total for total in totals if total is not None), default=len(nodes))
        strongest = sorted(range(len(nodes)), key=lambda index: (-_left(nodes[index], taken[index]), index))[:limit]
        used = [index in strongest for index in range(len(nodes))]
        prefill, decode = (
            [counts[phase] * is_used for counts, is_used in zip(defaults, used, strict=True)]
            if configured is None
            else _by_weight(configured, nodes, taken, used)
            for phase, configured in enumerate(totals)
        )
        return prefill, decode

    def _share(self, node: NodeCapacity, num_prefill: int, num_decode: int, num_gateways: int) -> NodeShare:
        num_standby = self._config.decode.standby if num_decode else 0
        index, self.counts.num_nodes = self.counts.num_nodes, self.counts.num_nodes + 1
        if self.deployment_id != FIRST_DEPLOYMENT:
            num_gateways = 0
        num_ports = self.counts.num_ports.get(node.address, 0)
        first_port = self._config.gateway.port + num_ports
        self.counts.num_ports[node.address] = num_ports + num_gateways
        ports: Sequence[int] = range(first_port, first_port + num_gateways)
        if self._config.gateway.shared_port:
            ports = [self._config.gateway.port] * num_gateways
        return NodeShare(
            node=node.name,
            pool_name=deployed_name(f"pool-{index}", self.deployment_id),
            prefill=self.names("prefill", num_prefill),
            decode=self.names("decode", num_decode + num_standby),
            num_standby=num_standby,
            gateways=tuple(zip(self.names("gateway", num_gateways), ports, strict=True)),
            is_head=index == 0,
            deployment_id=self.deployment_id,
        )

    def names(self, kind: str, count: int) -> tuple[str, ...]:
        """Return `count` new names of this kind; `decode` also stands for workers that do both phases."""
        if kind == "decode" and not self._is_separate:
            kind = "worker"
        first = self.counts.num_named.get(kind, 0)
        self.counts.num_named[kind] = first + count
        numbers = range(first, first + count)
        return tuple(deployed_name(f"{kind}-{number}", self.deployment_id) for number in numbers)


def engines_of(share: NodeShare, config: EngineConfig, node: NodeCapacity) -> Mapping[str, EngineConfig]:
    """Return each worker's engine section by its name, with its threads and device: prefill workers get theirs first.
    More computing threads than cores are worse than idle cores (see runtime/device/cores.py). Raises ConfigError as
    `first_gpus` does."""
    if not share.num_workers:
        return {}
    if node.gpus and share.num_standby:
        raise ConfigError("decode.standby is for workers on CPUs; on a GPU set decode.count higher")
    threads = config.threads_per_worker or max(1, node.num_cores // share.num_workers)
    devices = first_gpus(node.gpus, config.tensor_parallel) or ("cpu",)
    return {
        name: msgspec.structs.replace(config, threads_per_worker=threads, device=devices[index % len(devices)])
        for index, name in enumerate((*share.prefill, *share.decode))
    }


def first_gpus(gpus: Sequence[str], tensor_parallel: int) -> tuple[str, ...]:
    """Return the first GPU of each group of `tensor_parallel` neighbouring GPUs; empty without GPUs. The ranks of a
    worker share such a group. Raises ConfigError where there is no such group."""
    if tensor_parallel == 1:
        return tuple(gpus)
    numbers = [int(gpu.partition(":")[2]) for gpu in gpus]
    firsts: list[str] = []
    index = 0
    while index + tensor_parallel <= len(numbers):
        if numbers[index + tensor_parallel - 1] == numbers[index] + tensor_parallel - 1:
            firsts.append(gpus[index])
            index += tensor_parallel
        else:
            index += 1
    if gpus and not firsts:
        raise ConfigError(
            f"engine.tensor_parallel is {tensor_parallel}, but of the GPUs for the workers of this model "
            f"({', '.join(gpus)}) no {tensor_parallel} are neighbours; set it lower, or engine.device=cuda, or serve "
            "fewer models here"
        )
    return tuple(firsts)


def _default_counts(node: NodeCapacity, tensor_parallel: int, *, is_separate: bool) -> tuple[int, int]:
    num_gpus = len(first_gpus(node.gpus, tensor_parallel))
    if not is_separate:
        return 0, max(num_gpus, 1)
    return max(num_gpus // 2, 1), max(num_gpus - num_gpus // 2, 1)


def _by_weight(
    total: int, nodes: Sequence[NodeCapacity], taken: Sequence[int], used: Sequence[bool] | None = None
) -> list[int]:
    """Share workers out so that the weakest worker gets as much of a node as possible. `taken`: workers of other
    deployments on each node. With `used`, each of those nodes gets at least one and the others none."""
    usable = [index for index in range(len(nodes)) if used is None or used[index]]
    counts = [0] * len(nodes)
    if used is not None:
        for index in usable:
            counts[index] = 1
    for _ in range(total - sum(counts)):
        best = max(
            usable, key=lambda index: (_left(nodes[index], taken[index] + counts[index]), -counts[index], -index)
        )
        counts[best] += 1
    return counts


def _left(node: NodeCapacity, num_workers: int) -> float:
    return node.weight / (num_workers + 1)


def _set_count(count: int) -> int | None:
    return None if isinstance(count, DefaultSize) else count
