"""The meaning of engine.device=auto: the GPUs of this machine once they have passed the self-check, else the CPU."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from alignedserve.config.sections import ClusterConfig
from alignedserve.runtime.device.devices import (
    AUTO,
    CPU,
    CUDA,
    cache_folder,
    cuda_obstacle,
    describe_gpus,
    gpu_names,
    machine_remarks,
    obstacle_on,
)

logger = logging.getLogger(__name__)

Check = Callable[[str], str | None]  # of a GPU by its name: why it cannot be trusted, if so


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device that is used, and what the user should be told of it."""

    device: str  # as engine.device, but never auto
    remark: str = ""
    is_warning: bool = False  # there is a GPU, and it is not used

    def log(self) -> None:
        if self.remark:
            logger.log(logging.WARNING if self.is_warning else logging.INFO, self.remark)


def with_device(config: ClusterConfig, choice: DeviceChoice) -> ClusterConfig:
    replace = msgspec.structs.replace
    return replace(config, engine=replace(config.engine, device=choice.device))


def choose_device(name: str, check: Check | None = None) -> DeviceChoice:
    """Return what `name`, as engine.device, means here; only auto asks anything. `check`: replaces the self-check. The
    first check of a GPU takes as long as compiling kernels does, later ones are remembered."""
    if name != AUTO:
        return DeviceChoice(name, "; ".join(machine_remarks()) if name.startswith(CUDA) else "")
    if cuda_obstacle() is not None:
        return DeviceChoice(CPU)
    check = check or partial(obstacle_on, folder=cache_folder())
    for gpu in gpu_names(CUDA):
        obstacle = check(gpu)
        if obstacle is not None:
            return DeviceChoice(
                CPU,
                f"{gpu} IS NOT USED, workers compute on the CPU: {obstacle}. engine.device=cuda takes the GPU "
                "nevertheless, engine.device=cpu asks nothing",
                is_warning=True,
            )
    taken = f"engine.device=auto takes {'; '.join(describe_gpus())}: the self-check has passed"
    return DeviceChoice(CUDA, "; ".join((taken, *machine_remarks())))
