"""Starts a cluster on this host."""

import msgspec

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import ActorClasses
from alignedserve.cluster.deployments.cluster import ClusterOfModels
from alignedserve.cluster.deployments.deployment import Deployment, PlacedModel, check
from alignedserve.cluster.deployments.division import Part, assigned_gpus, divide, worker_bytes
from alignedserve.cluster.deployments.preparation import DeploymentSettings, Preparing
from alignedserve.cluster.gpu_claims import GpuClaims, GpusTaken, claim_gpus
from alignedserve.cluster.machine import this_machine, with_gpus
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.recording_folder import prepare_recording
from alignedserve.cluster.run_folder import make_run_folder, make_run_root
from alignedserve.cluster.sizing import SizeChoice
from alignedserve.cluster.start_observer import LoggingObserver, StartObserver
from alignedserve.config.model_settings import ModelSettings
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ConfigError
from alignedserve.process.addresses import AddressBook, numbered_deployment
from alignedserve.runtime.device.devices import AUTO, CPU, gpu_names
from alignedserve.runtime.device_check.choice import DeviceChoice, choose_device, with_device
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.scheduling.topology import require_effect


def launch_cluster(
    settings: ModelSettings, actor_classes: ActorClasses, observer: StartObserver | None = None
) -> ClusterOfModels:
    """Start a cluster on this host alone and return it when it is up.

    Unset sizes are worked out, which the observer is told before anything starts. Raises an error of the tree, with
    nothing left running, when it cannot.
    """
    observer = observer or LoggingObserver()
    configs = [_checked(config, len(settings.own)) for config in settings.configs]
    choice, claims = _claimed(configs[0].engine.device)
    observer.device_chosen(choice)
    configs = [with_device(config, choice) for config in configs]
    machine = with_gpus(this_machine(choice.device), gpu_names(choice.device), claims.gpus)
    models = _planned(configs, machine, claims.gpus)
    remove_stale_arenas(arena_folder(), ARENA_PREFIX)
    book = AddressBook(make_run_folder())
    for _, sizes in models:
        observer.sizes_chosen(
            sizes, has_others=len(models) > 1
        )  # when nothing is left that refuses the start in one line
    deployments = _deployments(models, book, actor_classes)
    own = {one.deployment_id: own for one, own in zip(deployments, settings.own, strict=True)}
    preparing = Preparing(
        DeploymentSettings(settings, own, book.folder),
        (machine, claims),
        book,
        (actor_classes, deployments[0].factory.secrets),
    )
    cluster = ClusterOfModels(deployments, preparing, observer)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _claimed(device: str) -> tuple[DeviceChoice, GpuClaims]:
    """Return what engine.device means and claim its GPUs; the CPU where `auto` finds that others have them all.

    Raises ConfigError, or ResourceError where GPUs that were asked for are another cluster's.
    """
    choice = choose_device(device)
    try:
        return choice, claim_gpus(gpu_names(choice.device), make_run_root())
    except GpusTaken as error:
        if device != AUTO:
            raise
        return DeviceChoice(CPU, f"{error}; workers compute on the CPU", is_warning=True), GpuClaims()


def _checked(config: ClusterConfig, num_models: int) -> ClusterConfig:
    """Return one model's configuration, with a model of this machine. Raises ConfigError, or like Hub.fetch."""
    if config.scaling.max_nodes is not None:
        raise ConfigError("scaling.max_nodes is for a cluster of several hosts (RAY_ADDRESS); leave it out")
    if config.recording.folder is not None and num_models > 1:
        raise ConfigError("recording.folder is for a cluster of one model; leave it out")
    config = msgspec.structs.replace(config, model=with_local_model(config.model))
    require_effect(config)
    return config


def _planned(
    configs: list[ClusterConfig], machine: Machine, gpus: tuple[str, ...]
) -> list[tuple[PlacedModel, SizeChoice]]:
    """Give each model its part of the machine. Raises an error of the tree where one does not fit."""
    ids = [numbered_deployment(number) for number in range(1, len(configs) + 1)]
    devices = assigned_gpus(gpus, len(configs))
    placed = [PlacedModel.of(*one) for one in zip(configs, devices, ids, strict=True)]
    served = [one.resolve(Part(machine)) for one in placed]
    taken = [
        one.config.num_workers * worker_bytes(one.config, model) for one, model in zip(placed, served, strict=True)
    ]
    models: list[tuple[PlacedModel, SizeChoice]] = []
    for one, model, part in zip(placed, served, divide(machine, gpus, taken), strict=True):
        choice = one.size(model, part)
        if not models:
            preflight.check(choice.config, choice.served)
            choice = _recorded(choice)
        if len(configs) > 1:
            check(one, choice, part)
        models.append((one, choice))
    return models


def _recorded(choice: SizeChoice) -> SizeChoice:
    return SizeChoice(prepare_recording(choice.config, choice.served), choice.served, choice.warnings)


def _deployments(
    models: list[tuple[PlacedModel, SizeChoice]], book: AddressBook, classes: ActorClasses
) -> list[Deployment]:
    """Combine what was planned; all share the secrets of the first."""
    first = Deployment.of(*models[0], book, classes)
    return [first, *(Deployment.of(*one, book, classes, first.factory.secrets) for one in models[1:])]
