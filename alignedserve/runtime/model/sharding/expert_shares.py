"""The processes of a worker that share the experts of a model: which of them each has, on every layer."""

from dataclasses import dataclass

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.decoder.model_config import ModelConfig

MAX_SHARES = 64


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """One of `size` processes; the first is the worker's, which has all but experts as well."""

    index: int
    size: int

    def experts(self, num_experts: int) -> range:
        """Return the experts of a layer that it has, whole."""
        return range(num_experts * self.index // self.size, num_experts * (self.index + 1) // self.size)


def check_expert_parallel(config: ModelConfig, size: int, num_others: int, device: str) -> None:
    """Raise ConfigError unless so many processes can share the model's experts, and it helps.

    `num_others`: ranks or stages of the worker.
    """
    if size == 1:
        return
    setting = f"engine.expert_parallel is {size}, but"
    if config.experts is None:
        raise ConfigError(f"{setting} the model has no experts; leave it out, or set engine.tensor_parallel")
    if num_others > 1:
        raise ConfigError(
            f"{setting} engine.tensor_parallel or engine.pipeline_parallel is {num_others}, and ranks and stages have "
            "parts of all experts or all of some layers; set one of them to 1"
        )
    if device.startswith("cuda"):
        raise ConfigError(
            f"{setting} experts are shared by processes on CPUs alone, not on {device}: a GPU computes all of a layer "
            "together; set it to 1, or engine.tensor_parallel higher"
        )
    if not 1 <= size <= min(config.experts.num_experts, MAX_SHARES):
        raise ConfigError(
            f"{setting} a layer's {config.experts.num_experts} experts are whole in one process each; set it to "
            f"{min(config.experts.num_experts, MAX_SHARES)} at most"
        )
