"""The least that a step can read: each matrix that it multiplies with once, keys and values of its contexts."""

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from benchmarks.gpu.ledger.forms import ModelForm, StepForm
from benchmarks.gpu.ledger.kernel_bytes import met_share

_ROUTER_BYTES = 4.0  # of a number: routers are in float32


def ideal_bytes(form: ModelForm, step: StepForm) -> float:
    """Return the bytes of weights and cache of a step of decodes."""
    return _matrix_bytes(form, step.num_decodes) + _cache_bytes(form, step)


def memory_bytes(form: ModelForm, step: StepForm) -> float:
    """Return the bytes of all weights, and of the cache of all the step's contexts."""
    config = form.config
    experts = 0 if config.experts is None else config.experts.num_experts
    layers = config.num_layers * _layer_bytes(form, experts)
    tokens = step.num_decodes * step.context_len + step.prompt_len
    return layers + 2 * _head_bytes(config) + tokens * _token_bytes(form)


def _matrix_bytes(form: ModelForm, num_rows: int) -> float:
    config = form.config
    met = 0.0
    if config.experts is not None:
        met = config.experts.num_experts * met_share(config.experts.num_experts, num_rows * config.experts.num_chosen)
    return config.num_layers * _layer_bytes(form, met) + _head_bytes(config)


def _layer_bytes(form: ModelForm, num_experts: float) -> float:
    config = form.config
    attention = config.hidden_size * (2 * config.query_width + 2 * config.kv_width)
    if config.experts is None:
        return (attention + 3 * config.hidden_size * config.intermediate_size) * form.weights.number_bytes
    router = config.hidden_size * config.experts.num_experts * _ROUTER_BYTES
    experts = 3 * num_experts * config.hidden_size * config.experts.intermediate_size
    return (attention + experts) * form.weights.number_bytes + router


def _head_bytes(config: ModelConfig) -> float:
    return 2.0 * config.vocab_size * config.embedding_size


def _token_bytes(form: ModelForm) -> int:
    return form.config.block_layout(16, form.cache or form.config.dtype).token_bytes


def _cache_bytes(form: ModelForm, step: StepForm) -> float:
    return step.num_decodes * step.context_len * _token_bytes(form)
