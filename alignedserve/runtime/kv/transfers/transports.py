"""Names of the transports for blocks, as engine.kv_transport has them."""

from alignedserve.config.sections import EngineConfig
from alignedserve.core.errors import ConfigError

AUTO, SHM, CUDA_IPC = "auto", "shm", "cuda_ipc"
FASTEST_FIRST = (CUDA_IPC, SHM, "tcp", "gloo")
TRANSPORTS = (AUTO, *FASTEST_FIRST)


def lends_device_memory(engine: EngineConfig) -> bool:
    """Return whether workers that compute on a GPU have their candidate buffers there."""
    return engine.kv_transport in (AUTO, CUDA_IPC) and engine.tensor_parallel == 1


def check_transport(engine: EngineConfig) -> None:
    """Check that there is a way from worker to worker. Raises ConfigError."""
    if engine.kv_transport == CUDA_IPC and engine.tensor_parallel > 1:
        raise ConfigError(
            "engine.kv_transport is cuda_ipc, which moves blocks between GPUs, but those of several ranks go through "
            "the host's memory; leave it out"
        )
