"""The one place where a cost model is chosen by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.model import AttentionKernel, CostModel
from alignedserve.costmodel.model_shapes import ModelShape, model_shape
from alignedserve.costmodel.roofline import CALIBRATIONS, PLAIN, Calibration, RooflineModel
from lab.costmodel.list_schedule import DIVISIONS, ListScheduledModel, accelerator_of
from lab.costmodel.profile_file import read_profile
from lab.costmodel.published import llama_layers, opt_fits
from lab.costmodel.published.llama_layers import MeasuredLayersModel
from lab.costmodel.published.opt_fits import fitted_opt_model
from lab.costmodel.published.prompt_tables import prompt_table_model

FITTED = "fitted:"  # followed by the path of a profile
ROOFLINE = "roofline"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Model and accelerators of one worker.

    Names as in MODEL_SHAPES and HARDWARE; another model is given by its shape.
    """

    model: str | ModelShape = "opt-13b"
    hardware: str = "a100-80g"
    tensor_parallel: int = 1
    kernel: AttentionKernel = AttentionKernel.LOAD_BALANCED
    pipeline_parallel: int = 1  # stages, of so many accelerators each

    @property
    def shape(self) -> ModelShape:
        """Return the model's sizes. Raises ConfigError listing the names."""
        return model_shape(self.model) if isinstance(self.model, str) else self.model


def attention_kernel(name: str) -> AttentionKernel:
    """Return the kernel of that name. Raises ConfigError listing the names."""
    try:
        return AttentionKernel(name)
    except ValueError:
        raise ConfigError(f"kernel {name!r} is none of {', '.join(one.value for one in AttentionKernel)}.") from None


def make_cost_model(source: str, worker: WorkerSpec | None = None) -> CostModel:
    """Make the cost model named by a key of COST_MODELS for this worker, or by `fitted:FILE`, which names its own
    worker.

    Raises ConfigError listing what there is: a published one is of the models, accelerators and degrees measured.
    """
    if source.startswith(FITTED):
        if worker is not None:
            raise ConfigError(f"cost model {source!r} was measured: model and hardware cannot be chosen.")
        return read_profile(Path(source.removeprefix(FITTED))).cost_model()
    if source not in COST_MODELS:
        raise ConfigError(f"cost model {source!r} is none of {', '.join(COST_MODELS)}, {FITTED}FILE.")
    worker = worker or WorkerSpec()
    if worker.pipeline_parallel > 1 and source != ROOFLINE:
        raise ConfigError(f"cost model {source!r} was measured without stages; {ROOFLINE!r} works them out.")
    if worker.kernel not in DIVISIONS:
        return COST_MODELS[source](worker)
    balanced = COST_MODELS[source](replace(worker, kernel=AttentionKernel.LOAD_BALANCED))
    num_multiprocessors = hardware(worker.hardware).num_multiprocessors
    on = accelerator_of(worker.shape, num_multiprocessors, worker.tensor_parallel)
    return ListScheduledModel(balanced, DIVISIONS[worker.kernel], on)


def _roofline(worker: WorkerSpec, calibration: Calibration = PLAIN) -> CostModel:
    return RooflineModel(
        worker.shape,
        hardware(worker.hardware),
        tensor_parallel=worker.tensor_parallel,
        pipeline_parallel=worker.pipeline_parallel,
        kernel=worker.kernel,
        calibration=calibration,
    )


def _distserve(worker: WorkerSpec) -> CostModel:
    return _opt_fit("distserve", worker)


def _vllm(worker: WorkerSpec) -> CostModel:
    return _opt_fit("vllm", worker)


def _opt_fit(engine: str, worker: WorkerSpec) -> CostModel:
    if worker.hardware != opt_fits.HARDWARE_NAME:
        raise ConfigError(f"cost model {engine!r} was measured on {opt_fits.HARDWARE_NAME}, not on {worker.hardware}.")
    return fitted_opt_model(engine, worker.shape.name, worker.tensor_parallel, worker.kernel)


def _vidur(worker: WorkerSpec) -> CostModel:
    if worker.shape.name != llama_layers.MODEL_NAME:
        raise ConfigError(f"cost model 'vidur' is of {llama_layers.MODEL_NAME}, not of {worker.shape.name}.")
    return MeasuredLayersModel(worker.hardware, worker.tensor_parallel, worker.kernel)


def _splitwise(worker: WorkerSpec) -> CostModel:
    return prompt_table_model(worker.shape.name, worker.hardware, worker.tensor_parallel, worker.kernel)


COST_MODELS: dict[str, Callable[[WorkerSpec], CostModel]] = {
    ROOFLINE: _roofline,
    "distserve": _distserve,
    "vllm": _vllm,
    "vidur": _vidur,
    "splitwise": _splitwise,
    **{name: partial(_roofline, calibration=calibration) for name, calibration in CALIBRATIONS.items()},
}
