"""The time of an iteration from a model's shape and an accelerator's datasheet, for what is not measured.

linear    = max(flops / flop rate, bytes of weights / memory rate)
attention = pairs of the chunks * flops / flop rate + cache that the decodes read / memory rate
          + recurrent states, of each request read and written once / memory rate
iteration = max(overhead + linear + attention + collectives, copies between device and host)

A calibration (calibration.py) adds what these bounds leave out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import Hardware, pcie_link
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.costmodel.work import IterationWork


@dataclass(frozen=True, slots=True)
class Calibration:
    """Figures beside the shares of the peaks. The defaults are those of a plain roofline."""

    corner: float | None = None  # exponent; None: the larger bound alone
    chunk_flops: float | None = None  # share of the peak that chunks' attention reaches; None: Efficiency's, of pairs
    more_queries: float = 0.0  # of every chunk: blocks of queries that are not filled, keys read again for each
    more_keys: float = 0.0  # of every chunk: what a block of queries takes before its first key
    beside: float = 1.0  # at least 1: attention of prompts and decodes in one iteration, by that of both apart

    def __post_init__(self) -> None:
        assert self.beside >= 1.0, "an iteration would get cheaper by more work"

    def bounded_s(self, flops_s: float, weights_s: float) -> float:
        """Return the seconds of a product by those of its operations and of its weights."""
        if self.corner is None:
            return flops_s if flops_s > weights_s else weights_s
        return float((flops_s**self.corner + weights_s**self.corner) ** (1.0 / self.corner))

    def charged_pairs(self, work: IterationWork) -> float:
        """Return the (query, key) pairs that the chunks of an iteration are charged for.

        Example: 100 tokens after 400, with 68 queries and 740 keys more: 168 * 1240 = 208 320, not 45 050.
        """
        if self.chunk_flops is None:
            return work.prompt_pairs
        unmasked = work.prompt_pairs + (work.prompt_squares - work.num_prompt_tokens) / 2
        begun = self.more_keys * (work.num_prompt_tokens + self.more_queries * work.num_chunks)
        return unmasked + self.more_queries * work.prompt_keys + begun


PLAIN = Calibration()
_MEASURED = Calibration(corner=1.7, chunk_flops=0.483, more_queries=68.0, more_keys=740.0, beside=1.08)
CALIBRATIONS: Mapping[str, Calibration] = {
    "calibrated": _MEASURED,
    "contended": replace(_MEASURED, beside=1.84),
}
"""By name of the cost model. `contended`: with the most that a kernel has been seen to lose by taking both kinds."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the datasheet's peaks that kernels reach, and what comes on top. docs/costmodels.md compares."""

    linear_flops: float = (
        0.70  # Llama-2-7B's matrices at 512 tokens and more: 0.68 to 0.72 on A100, 0.64 to 0.77 on H100
    )
    linear_bytes: float = 0.75  # the same at 64 tokens and fewer: 0.71 to 0.79 (Vidur's tables)
    prefill_attention_flops: float = 0.50  # fused causal attention, heads of 64 to 128
    decode_attention_bytes: float = 0.65  # what DistServe's fits for OPT-13B and OPT-66B on A100 amount to
    elementwise_share: float = 0.10  # norms, activation, rotation, residuals, by the matrices: 0.08 to 0.17 (Vidur)
    layer_overhead_s: float = 40e-6  # of a layer's kernels, launched one by one
    all_reduce_s: float = 30e-6  # latency of one among 2 (10 us) to 8 accelerators (38 to 62 us; Vidur's tables)
    nvlink_bytes: float = 0.60  # an all-reduce of 64 MiB: 0.5 to 0.8 of the datasheet's rate
    hop_s: float = 100e-6  # of hidden vectors from a machine to the next, by way of both hosts


class RooflineModel:
    """One worker: a model on `tensor_parallel` accelerators of one kind, or on so many for each of its stages.

    Stages compute as many groups of requests at once as there are stages: each reads its weights once for every group,
    so that more of them read no faster, and compute and read caches as many times faster. See CostModel.

    Raises ConfigError when the accelerator has no such dtype or the heads cannot be divided.
    """

    def __init__(
        self,
        shape: ModelShape,
        machine: Hardware,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        kernel: AttentionKernel = AttentionKernel.LOAD_BALANCED,
        efficiency: Efficiency = Efficiency(),
        calibration: Calibration = PLAIN,
    ) -> None:
        if tensor_parallel < 1 or shape.num_heads % tensor_parallel:
            raise ConfigError(f"tensor_parallel must divide the {shape.num_heads} heads of {shape.name!r}.")
        self.shape = shape
        self._kernel = kernel
        self._calibration = calibration
        self._num_heads = shape.num_heads // tensor_parallel  # of one accelerator
        self._num_multiprocessors = machine.num_multiprocessors
        flops_per_s = tensor_parallel * pipeline_parallel * machine.peak_flops(shape.dtype)
        bytes_per_s = tensor_parallel * machine.memory_bytes_per_s
        elementwise = 1.0 + efficiency.elementwise_share
        self._flop_s = elementwise / (flops_per_s * efficiency.linear_flops)
        self._weight_s = shape.dtype_bytes / (bytes_per_s * efficiency.linear_bytes)
        # A shape works these out at each access, and a policy predicts hundreds of iterations in a decision.
        self._token_parameters, self._head_parameters = shape.token_parameters, shape.head_parameters
        self._has_experts = shape.num_expert_layers > 0
        self._projection_s = shape.projection_flops * self._flop_s
        self._hidden_gain = shape.hidden_ratio - 1.0
        chunk_flops = calibration.chunk_flops or efficiency.prefill_attention_flops
        self._pair_s = shape.pair_flops / (flops_per_s * chunk_flops)
        cache_bytes_per_s = pipeline_parallel * bytes_per_s * efficiency.decode_attention_bytes
        self._context_token_s = shape.kv_token_bytes / cache_bytes_per_s
        self._state_s = 2 * shape.num_state_layers * shape.state_layer_bytes / cache_bytes_per_s
        self._overhead_s = shape.num_layers * efficiency.layer_overhead_s
        self._overhead_s += efficiency.hop_s * (pipeline_parallel if pipeline_parallel > 1 else 0)
        self._all_reduces_s = self._reduced_token_s = 0.0
        if tensor_parallel > 1:
            self._all_reduces_s = 2 * shape.num_layers * efficiency.all_reduce_s
            reduced_bytes = 2 * shape.num_layers * shape.hidden_size * shape.dtype_bytes
            travelling = 2 * (tensor_parallel - 1) / tensor_parallel  # of each byte, over every accelerator's links
            self._reduced_token_s = reduced_bytes * travelling / (efficiency.nvlink_bytes * machine.nvlink_bytes_per_s)
        self._swap_token_s = (
            shape.kv_token_bytes / (tensor_parallel * pipeline_parallel) / pcie_link(machine).bytes_per_s
        )

    def iteration_s(self, work: IterationWork) -> float:
        num_tokens = work.num_prompt_tokens + work.num_decodes
        attention = self._pair_s * self._calibration.charged_pairs(work) + self._decode_attention_s(work)
        if work.num_chunks and work.num_decodes:
            attention *= self._calibration.beside
        attention += self._state_s * (work.num_chunks + work.num_decodes)
        compute = self._overhead_s + self._linear_s(work, num_tokens) + attention + self.collectives_s(num_tokens)
        copies = self._swap_token_s * (work.swap_in_tokens + work.swap_out_tokens)
        return compute if compute > copies else copies

    def swap_s(self, num_tokens: float) -> float:
        return self._swap_token_s * num_tokens

    def layers_s(self, num_tokens: int) -> float:
        """Return the seconds of num_tokens through all layers: matrices, and elementwise work between them."""
        if not self._has_experts or not num_tokens:
            return self._product_s(self._token_parameters, num_tokens)
        weights_s = self.shape.read_parameters(num_tokens) * self._weight_s
        return self._calibration.bounded_s(2 * self._token_parameters * num_tokens * self._flop_s, weights_s)

    def collectives_s(self, num_tokens: int) -> float:
        """Return the all-reduce time for num_tokens, two per layer."""
        return self._all_reduces_s + self._reduced_token_s * num_tokens

    def _linear_s(self, work: IterationWork, num_tokens: int) -> float:
        layers = self.layers_s(num_tokens)
        head = self._product_s(self._head_parameters, work.num_sampled)
        return layers + head + self._projection_s * work.hidden_context_len

    def _product_s(self, num_parameters: int, num_rows: int) -> float:
        if not num_rows:
            return 0.0
        flops_s, weights_s = 2 * num_parameters * num_rows * self._flop_s, num_parameters * self._weight_s
        return self._calibration.bounded_s(flops_s, weights_s)

    def _decode_attention_s(self, work: IterationWork) -> float:
        """Return the seconds of reading the cache; a hidden one has `hidden_ratio` of the bytes, a gain that the
        straggler does not see.

        With one block of threads per sequence and head, blocks run in waves of one for each multiprocessor, which share
        the memory rate, and every wave lasts as long as the longest context.
        """
        more = self._hidden_gain
        if self._kernel is AttentionKernel.LOAD_BALANCED:
            return self._context_token_s * (work.decode_context_len + more * work.hidden_context_len)
        num_waves = -(-work.num_decodes * self._num_heads // self._num_multiprocessors)
        contexts = num_waves * self._num_multiprocessors / self._num_heads
        longest = contexts * work.max_decode_context_len
        return self._context_token_s * (longest + max(more, 0.0) * work.hidden_context_len)
