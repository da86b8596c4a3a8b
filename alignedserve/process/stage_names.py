"""The names of a worker's stages that are processes of other hosts."""

from alignedserve.process.addresses import deployed_name, deployment_of

_STAGE = "-stage-"


def stage_name(worker: str, index: int) -> str:
    """Return the name of a stage behind the first of the worker of this name."""
    return deployed_name(f"{worker.partition('.')[0]}{_STAGE}{index}", deployment_of(worker))


def worker_of_stage(name: str) -> str:
    """Return the name of the worker that the stage of this name belongs to."""
    return deployed_name(name.partition(".")[0].rpartition(_STAGE)[0], deployment_of(name))
