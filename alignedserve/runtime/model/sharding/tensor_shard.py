"""The share of one rank in a model that several ranks compute together: which heads, inner columns and tokens are its.

Attention is split by heads, the feed-forward part by its inner width, embedding and head by the vocabulary (Shoeybi et
al., Megatron-LM, arXiv:1909.08053). Key heads that are fewer than the ranks are held by several of them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.decoder.decoder_parts import HeadNormKind
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES

MAX_RANKS = MAX_SHARES = 64
# Inner widths are divided at multiples of one of these, so that blocks of packed weights stay whole.
_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_MOST_UNEVEN = 1.07  # the largest share, by the mean one


class Span(NamedTuple):
    """Consecutive rows, columns or heads."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> "Span":
        return Span(self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One of `size` ranks."""

    rank: int
    size: int

    def heads(self, config: ModelConfig) -> Span:
        """Return the query heads of the rank; `config` of the whole model, here and below."""
        return _even(config.num_heads, self)

    def kv_heads(self, config: ModelConfig) -> Span:
        """Return the key heads that the rank's query heads read."""
        if config.num_kv_heads >= self.size:
            return _even(config.num_kv_heads, self)
        head = self.rank * config.num_kv_heads // self.size
        return Span(head, head + 1)

    def tokens(self, config: ModelConfig) -> Span:
        """Return the tokens whose embedding and logits the rank has."""
        return Span(config.vocab_size * self.rank // self.size, config.vocab_size * (self.rank + 1) // self.size)

    def inner(self, width: int) -> Span:
        """Return the columns between the two products of a feed-forward part of this inner width."""
        unit = next(unit for unit in _UNITS if _suits(width, unit, self.size))
        count = width // unit
        return Span(count * self.rank // self.size, count * (self.rank + 1) // self.size).times(unit)

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config of what the rank computes; vocabulary and residual stream are those of the model."""
        experts = config.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=self.inner(experts.intermediate_size).size,
                shared_size=self.inner(experts.shared_size).size if experts.shared_size else 0,
            )
        return replace(
            config,
            num_heads=self.heads(config).size,
            num_kv_heads=self.kv_heads(config).size,
            intermediate_size=self.inner(config.intermediate_size).size,
            experts=experts,
        )


def check_tensor_parallel(config: ModelConfig, size: int) -> None:
    """Raise ConfigError unless this many ranks can compute the model; the error names numbers that can."""
    if _obstacle(config, size) is None:
        return
    fitting = [str(other) for other in range(1, MAX_RANKS + 1) if _obstacle(config, other) is None]
    raise ConfigError(
        f"engine.tensor_parallel is {size}, but {_obstacle(config, size)}; with this model it may be "
        f"{' or '.join(fitting)}"
    )


def _obstacle(config: ModelConfig, size: int) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if not 1 <= size <= MAX_RANKS:
        return f"a worker has 1 to {MAX_RANKS} ranks"
    if size > 1 and config.head_norm is HeadNormKind.WHOLE:
        return "the model normalises the queries of all heads together, which one rank must have"
    if size > 1 and config.latent is not None:
        return "the model's latents belong to all heads, which one rank must have"
    if size > 1 and config.state is not None:
        return "the states of the model's layers are not divided"
    if size > 1 and config.extras is not None:
        return f"a model with {config.extras.title} is not divided"
    if size > 1 and FAMILIES[config.family].names.transposes_experts:
        return "the tensors of the model's experts are not divided"
    if heads % size:
        return f"the model's {heads} attention heads cannot be divided among {size} ranks"
    if kv_heads % size and size % kv_heads:
        return f"the model's {kv_heads} key heads can be neither divided among {size} ranks nor shared by equally many"
    experts = config.experts
    widths = [config.intermediate_size]
    widths += [] if experts is None else [width for width in (experts.intermediate_size, experts.shared_size) if width]
    if min(*widths, config.vocab_size) < size:
        return f"the model is narrower than {size} ranks"
    return None


def _even(count: int, shard: TensorShard) -> Span:
    share = count // shard.size
    return Span(shard.rank * share, (shard.rank + 1) * share)


def _suits(width: int, unit: int, size: int) -> bool:
    count, rest = divmod(width, unit)
    return unit == 1 or (not rest and -(-count // size) * size <= count * _MOST_UNEVEN)


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """One of `size` processes; the first is the worker's, which has all but experts as well."""

    index: int
    size: int

    def experts(self, num_experts: int) -> range:
        """Return the experts of a layer that it has, whole."""
        return range(num_experts * self.index // self.size, num_experts * (self.index + 1) // self.size)


def check_expert_parallel(config: ModelConfig, size: int, num_others: int, device: str) -> None:
    """Raise ConfigError unless so many processes can share the experts. `num_others`: ranks or stages of the worker."""
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
