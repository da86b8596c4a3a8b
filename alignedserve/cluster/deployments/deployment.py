"""One deployment of a cluster on this host: its plan, its processes, and what gateways are told of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, ClusterSecrets, PreparedNode
from alignedserve.cluster.deployments.division import Holding, Part, holding_of
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.placement import NodeCapacity, NodeShare, Placement
from alignedserve.cluster.sizing import SizeChoice, choose_sizes
from alignedserve.config.sections import MIB, ClusterConfig
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.process.addresses import FIRST_DEPLOYMENT, AddressBook
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.engine.engine_sizes import bytes_beside_blocks
from alignedserve.runtime.lora.adapter_folders import with_adapters
from alignedserve.runtime.model.served_deployment import DeploymentPhase, ServedDeployment
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.scheduling.factory import resolve_policy


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with the workers that this host gives it, whose sizes are not chosen yet."""

    config: ClusterConfig  # with the counts of its workers
    capacity: NodeCapacity
    share: NodeShare

    @classmethod
    def of(cls, config: ClusterConfig, gpus: tuple[str, ...], deployment_id: str = FIRST_DEPLOYMENT) -> "PlacedModel":
        """Place a model on this host, of whose GPUs it gets these. Raises ConfigError for an unknown policy."""
        config = resolve_policy(config)
        capacity = NodeCapacity("node-0", "", num_cores(), gpus)
        (share,) = Placement(config, deployment_id).place([capacity])
        return cls(share.config_of(config), capacity, share)

    def resolve(self, part: Part) -> ServedModel:
        """Read the model's config and its adapters. Raises ModelError, AdapterError or ConfigError."""
        return with_adapters(resolve_for([part.machine], self.config), self.config.lora)

    def size(self, served: ServedModel, part: Part) -> SizeChoice:
        """Choose the sizes that are unset, for this part of the machine. Raises NotEnoughMemory."""
        beside = bytes_beside_blocks(served, self.config.scheduling, self.config.engine.block_size)
        return choose_sizes(self.config, served, part.machine, recomputing_bytes=beside)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment whose processes may be created."""

    node: PreparedNode
    choice: SizeChoice
    factory: ActorFactory
    remarks: tuple[str, ...] = ()  # for who has ordered it

    @classmethod
    def of(
        cls,
        placed: PlacedModel,
        choice: SizeChoice,
        book: AddressBook,
        classes: ActorClasses,
        secrets: ClusterSecrets | None = None,
        *,
        joins_others: bool = False,
    ) -> "Deployment":
        """Combine what was planned. `secrets`: of the cluster that it joins; None: of a new one.

        `joins_others`: other models serve already.
        """
        node = PreparedNode(placed.share, placed.capacity, choice.config, book, joins_others=joins_others)
        return cls(node, choice, ActorFactory(choice.served, classes, secrets))

    @property
    def deployment_id(self) -> str:
        """Return its id; empty: the first."""
        return self.node.share.deployment_id

    @property
    def served(self) -> ServedModel:
        """Return its model."""
        return self.choice.served

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of its processes that compute."""
        return self.node.share.workers

    @property
    def process_names(self) -> tuple[str, ...]:
        """Return the names of all its own processes, its pool's whether it has one or not."""
        return (self.node.share.router, self.node.share.pool_name, *self.workers)

    @property
    def holding(self) -> Holding:
        """Return what it takes of the machine."""
        return holding_of(self.choice.config, self.served, self.node.capacity.gpus)

    def announced(self, phase: DeploymentPhase) -> ServedDeployment:
        """Return what gateways are told of it."""
        config = self.choice.config
        return ServedDeployment(
            served=self.served,
            block_size=config.engine.block_size,
            prefix_cache=config.prefix_cache,
            deployment_id=self.deployment_id,
            router=self.node.share.router,
            phase=phase,
        )


def require_room(name: str, holding: Holding, part: Part) -> None:
    """Check that one more deployment fits beside those that serve. Raises NotEnoughMemory."""
    needs = {
        "of memory": (holding.host_bytes, part.machine.available_bytes),
        "in the folder of the KV pool": (holding.shared_bytes, part.machine.shared_bytes),
        "on a GPU": (holding.gpu_bytes, min(part.machine.gpu_bytes, default=0)),
    }
    for place, (needed, left) in needs.items():
        if needed > left:
            raise NotEnoughMemory(
                f"{name} needs {needed // MIB} MiB {place} beside the models that are served, {left // MIB} MiB are "
                "left; remove a model, or set decode.kv_cache_bytes or model.max_context_len lower"
            )


def resolve_for(machines: Sequence[Machine], config: ClusterConfig) -> ServedModel:
    """Read the model's config, to be computed alike on all these machines; without any, on one that can all.

    Raises ModelError or ConfigError.
    """
    return resolve_model(
        config.model,
        config.engine.device,
        config.engine.kv_cache_dtype,
        has_bfloat16=all(machine.has_bfloat16 for machine in machines),
        has_float8=all(machine.has_float8 for machine in machines),
        tensor_parallel=config.engine.tensor_parallel,
    )


def check(placed: PlacedModel, choice: SizeChoice, part: Part) -> None:
    """Check one more deployment. Raises ConfigError, ModelError or NotEnoughMemory."""
    preflight.check_configuration(choice.config, choice.served)
    require_room(choice.served.name, holding_of(choice.config, choice.served, placed.capacity.gpus), part)
