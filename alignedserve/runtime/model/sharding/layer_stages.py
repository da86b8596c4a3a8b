"""The stages of a worker whose processes compute a model one after another: which layers each has.

The first stage has the embedding and the head as well, whose products count as layers do: it has fewer of these."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.decoder.model_config import ModelConfig

MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class LayerStage:
    """Consecutive layers of a model, of one of its worker's stages."""

    index: int
    size: int  # stages of the worker
    first: int  # layer
    end: int  # behind its last layer

    @property
    def is_first(self) -> bool:
        """Return whether it has the embedding and the head."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether what it computes goes to the head."""
        return self.index == self.size - 1

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config of these layers alone, numbered from 0; `config` of the whole model."""
        experts = config.experts
        if experts is not None:
            experts = replace(experts, dense_layers=self._own(experts.dense_layers))
        state_layers = self._own(config.state_layers)
        return replace(
            config,
            state=config.state if state_layers else None,
            state_layers=state_layers,
            num_layers=self.end - self.first,
            windowed_layers=self._own(config.windowed_layers),
            unrotated_layers=self._own(config.unrotated_layers),
            bare_layers=self._own(config.bare_layers),
            experts=experts,
        )

    def _own(self, layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(layer - self.first for layer in layers if self.first <= layer < self.end)


def layer_stages(config: ModelConfig, size: int) -> tuple[LayerStage, ...]:
    """Divide the layers so that the stage with the most weights has as few as can be, and each some that attend."""
    head = config.vocab_size * config.embedding_size
    weights = [_weights_of(config, layer, head) for layer in range(config.num_layers)]
    ends = _ends(weights, size, head, config.attention_layers)
    return tuple(
        LayerStage(index, size, first, end) for index, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
    )


def staged_layout(config: ModelConfig, size: int, block_size: int, dtype: str) -> BlockLayout:
    """Return the layout of a block: the parts of the stages one behind another, each with its own states behind it."""
    whole = config.block_layout(block_size, dtype)
    if not whole.state_bytes:
        return whole
    parts = [stage.local(config).block_layout(block_size, dtype) for stage in layer_stages(config, size)]
    num_runs = sum(part.runs_per_block - part.kv_runs for part in parts)
    return replace(whole, state_bytes=num_runs * (whole.kv_bytes // whole.kv_runs))


def check_pipeline_parallel(config: ModelConfig, size: int, tensor_parallel: int, device: str) -> None:
    if size == 1:
        return
    if tensor_parallel > 1:
        raise ConfigError(
            f"engine.pipeline_parallel is {size} and engine.tensor_parallel is {tensor_parallel}, but the ranks of a "
            "worker share all its layers or have some each; set one of them to 1"
        )
    if device.startswith("cuda"):
        raise ConfigError(
            f"engine.pipeline_parallel is {size}, but stages are computed on CPUs alone, not on {device}; set it to 1, "
            "or engine.tensor_parallel higher"
        )
    num_layers = len(config.attention_layers)  # of which each stage has some
    if not 1 <= size <= min(num_layers, MAX_STAGES):
        kind = "layers" if num_layers == config.num_layers else "layers with attention"
        raise ConfigError(
            f"engine.pipeline_parallel is {size}, but the model's {num_layers} {kind} make at most "
            f"{min(num_layers, MAX_STAGES)} stages"
        )
    if config.extras is not None:
        raise ConfigError(
            f"engine.pipeline_parallel is {size}, but a model with {config.extras.title} is not divided; set it to 1"
        )


def _weights_of(config: ModelConfig, layer: int, head: int) -> int:
    return max(LayerStage(0, 1, layer, layer + 1).local(config).num_projected - head, 1)


def _ends(weights: Sequence[int], size: int, head: int, attending: Sequence[int]) -> tuple[int, ...]:
    """Return the ends of stages, each with an attending layer, whose heaviest stage is lightest; ties: early ends."""
    count = len(weights)
    sums = [0]
    num_attending = [sum(layer < end for layer in attending) for end in range(count + 1)]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[end]: the heaviest of the stages so far, and their ends.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (head + sums[end], (end,)) for end in range(1, count - size + 2) if num_attending[end]
    }
    for stage in range(1, size):
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (size - stage) + 2):
            options = (
                (max(heaviest, sums[end] - sums[first]), (*ends, end))
                for first, (heaviest, ends) in best.items()
                if num_attending[first] < num_attending[end]
            )
            if (lightest := min(options, default=None)) is not None:
                following[end] = lightest
        best = following
    return best[count][1]
