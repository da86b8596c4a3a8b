"""A small random model computed on a device and on the CPU: chunks, prompts and recorded decodes, drawn and chosen.

    python -m alignedserve.runtime.device_check.self_check cuda:0 [--eager] [--kind "latent attention"]

Without a kind it is a Llama, else a small model with such layers (`device_kinds`). Prints a line of JSON and ends with
0 whatever it found; a crash or a hang is for who has started it to see.
"""

import argparse
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.attention.backend import AUTO, TORCH
from alignedserve.runtime.attention.ring_tables import num_scratch_blocks
from alignedserve.runtime.device.accelerator import use_device
from alignedserve.runtime.device.devices import FAILURE, OK
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step_passes import Capture
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.decoder_parts import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    Activation,
    CheckpointQuantization,
    NormKind,
    QuantMethod,
    RopeConfig,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.device_kinds import KINDS, RINGS
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weights.packed_products import GroupedRows, Rows
from alignedserve.runtime.model.weights.weight_loader import assemble_weights
from alignedserve.runtime.model.weights.weight_source import RandomSource, WeightSource
from kernels.gpu_dispatch import launch_failures
from kernels.grouped_linear import GroupedWeight, Numbers

_FLOAT_SIZE, _HALF_SIZE, _BYTE_SIZE = 2.9, 4.6, 18.5  # deviations of numbers that are drawn
_BLOCK_GROUP, _SMALL_GROUP = 32, 16


class DrawnWeights(WeightSource):
    """A source of one model's weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_packed: bool) -> None:
        """`is_packed`: experts stay packed where the model's files are quantised."""
        super().__init__(dtype, device)
        self._is_packed, self._quantization = is_packed, config.stored_quantization

    @override
    def has(self, name: str) -> bool:
        return _source_of(name).has(name)

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._narrow(name, shape)
        tensor = _source_of(name).tensor(name, shape) if weight is None else weight.unpacked(torch.float32)
        return tensor.to(self.device, self.dtype)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        weight = self._narrow(name, shape) if self._is_packed else None
        return None if weight is None else GroupedRows(weight).moved(self.device)

    def _narrow(self, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        if self._quantization is None or ".experts." not in name or len(shape) != 2:
            return None
        return _narrow_weight(self._quantization, name, *shape)


def _source_of(name: str) -> RandomSource:
    return RandomSource(zlib.crc32(name.encode()), torch.float32, torch.device("cpu"))


def _narrow_weight(quantization: CheckpointQuantization, name: str, rows: int, width: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    draw = partial(torch.randint, dtype=torch.uint8, generator=generator)
    if quantization.method is QuantMethod.BLOCKS:
        if "down" in name:  # as of Q6_K
            scales = torch.rand((rows, width // _SMALL_GROUP), generator=generator) / (_BYTE_SIZE * math.sqrt(width))
            zeros = torch.full_like(scales, 32, dtype=torch.uint8)
            return GroupedWeight(Numbers.INT8, draw(0, 64, (rows, width)), scales, zeros)
        scales = torch.rand((rows, width // _BLOCK_GROUP), generator=generator) / (_HALF_SIZE * math.sqrt(width))
        words = draw(0, 256, (rows, width // 2))
        return GroupedWeight(Numbers.INT4, words, scales, None, minima=-7.5 * scales)
    size, words = _FLOAT_SIZE * math.sqrt(width), draw(0, 256, (rows, width // 2))
    if quantization.has_float4(NVFP4_GROUP):
        small, factors = draw(0x30, 0x40, (rows, width // NVFP4_GROUP)), torch.full((rows,), 1.0 / size)
        return GroupedWeight(Numbers.NVFP4, words, small, None, factors)  # scales of 0.5 to 2
    exponent = 127 - round(math.log2(size))
    exponents = draw(exponent - 1, exponent + 2, (rows, width // MXFP4_GROUP))
    return GroupedWeight(Numbers.MXFP4, words, exponents, None)


_CPU = torch.device("cpu")
_SEED = 20
_BLOCK_SIZE, _MAX_CONTEXT_LEN, _NUM_BLOCKS = 16, 192, 48
# Differences of log-probabilities that rounding explains; logits have a deviation of about 1.
_TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 0.15}
_OF_KINDS = 2.0  # times as much: recurrences carry roundings along, and embeddings may be multiplied
# Heads like those of an 8B Llama, so that kernels are compiled as they are for large models.
MODEL = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    max_position_embeddings=_MAX_CONTEXT_LEN,
    activation=Activation.SILU,
    norm=NormKind.RMS,
    norm_eps=1e-5,
    embedding_size=256,
    dtype="float32",
    rope=RopeConfig(rotary_dim=128),
)


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What is computed: prompt lengths, the slices of each step, and the dtypes."""

    prompts: tuple[int, ...] = (150, 37, 5)
    steps: tuple[tuple[int, ...], ...] = ((100, 37, 0), (50, 1, 5), *((1, 1, 1),) * 4, (1, 0, 1))
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Computer:
    """Where and how the model is computed; attention and capture as in Engine."""

    device: torch.device
    attention: str = AUTO
    capture: Capture | None = field(default=None)
    has_rings: bool = False  # layers with a window keep no more than it


def obstacle_of(computer: Computer, plan: CheckPlan | None = None, model: ModelConfig = MODEL) -> str | None:
    """Return what the device computes otherwise than the CPU, or which kernels do not run there; None: nothing."""
    plan = plan or CheckPlan()
    use_device(computer.device)
    for dtype in plan.dtypes:
        expected = _compute(Computer(_CPU, TORCH), dtype, plan, model)
        tokens = _compute(computer, dtype, plan, model)
        tolerance = _TOLERANCES[dtype] * (1.0 if model is MODEL else _OF_KINDS)
        problem = _difference(tokens, expected, dtype, tolerance)
        if problem is not None:
            return problem
    failures = [f"{name} does not run: {reason}" for name, reason in launch_failures().items()]
    return failures[0] if failures else None


def _difference(
    tokens: list[SampledToken], expected: list[SampledToken], dtype: torch.dtype, tolerance: float
) -> str | None:
    name = dtype_name(dtype)
    if [token.request_id for token in tokens] != [token.request_id for token in expected]:
        return f"in {name} it has no numbers where the CPU has"
    differences = (abs(a - b) for token, other in zip(tokens, expected, strict=True) for a, b in _pairs(token, other))
    apart = max(differences, key=lambda difference: (math.isnan(difference), difference))
    if not apart <= tolerance:
        return f"in {name} log-probabilities differ from the CPU's by {apart:.3g}"
    if dtype == torch.float32 and [token.token_id for token in tokens] != [token.token_id for token in expected]:
        return "other tokens are drawn than on the CPU"
    return None


def _pairs(token: SampledToken, other: SampledToken) -> Iterator[tuple[float, float]]:
    if token.logprob is None or other.logprob is None:
        return
    yield token.logprob.logprob, other.logprob.logprob
    yield from zip((value for _, value in token.logprob.top), (value for _, value in other.logprob.top), strict=True)


def _compute(computer: Computer, dtype: torch.dtype, plan: CheckPlan, config: ModelConfig) -> list[SampledToken]:
    source = DrawnWeights(config, dtype, computer.device, is_packed=computer.attention != TORCH)
    model = Decoder(config, assemble_weights(config, source))
    layout = config.block_layout(_BLOCK_SIZE, dtype_name(dtype))
    if computer.has_rings:
        layout = config.layout_of_rings(layout)
    num_scratch = num_scratch_blocks(layout, max(map(sum, plan.steps)), len(plan.prompts))
    has_scratch = computer.capture is not None or computer.device.type != "cpu"
    storage = BlockStorage(layout, _NUM_BLOCKS, computer.device, has_scratch=has_scratch)
    storage.bytes.fill_(0xFF)  # no numbers: what is read and was never written shows
    engine = Engine(
        model=model,
        storage=storage,
        options=EngineOptions(
            max_sequences=len(plan.prompts), max_context_len=_MAX_CONTEXT_LEN, attention=computer.attention
        ),
        capture=computer.capture,
        own_blocks=OwnBlocks(ring_scratch=[BlockId(_NUM_BLOCKS - 1 - index) for index in range(num_scratch)]),
    )
    engine.record_graphs()
    for sequence in _sequences(plan, layout, _NUM_BLOCKS - num_scratch):
        engine.add_sequence(sequence)
    names = [RequestId(str(index)) for index in range(len(plan.prompts))]
    tokens: list[SampledToken] = []
    for counts in plan.steps:
        output = engine.execute([(name, count) for name, count in zip(names, counts, strict=True) if count])
        tokens += sorted(output.sampled, key=lambda token: token.request_id)
        if output.failed:
            break
    return tokens


def _sequences(plan: CheckPlan, layout: BlockLayout, num_blocks: int) -> Iterator[NewSequence]:
    random = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(_SEED)).tolist()
    for index, length in enumerate(plan.prompts):
        tokens = tuple(torch.randint(0, MODEL.vocab_size, (length,), generator=random).tolist())
        blocks = tuple(BlockId(order.pop()) for _ in range(layout.blocks_for(length + len(plan.steps))))
        fixed = SamplingParams(temperature=0.0, allowed_token_ids=(index + 7,), num_logprobs=8, max_tokens=100)
        drawn = SamplingParams(temperature=1.0, seed=_SEED, max_tokens=100)
        is_last = index == len(plan.prompts) - 1
        yield NewSequence(RequestId(str(index)), tokens, length, 0, blocks, drawn if is_last else fixed)


def _nothing_recorded(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    work()
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--eager", action="store_true", help="nothing is recorded as a graph")
    parser.add_argument("--kind", choices=list(KINDS), help="of layers; without it a Llama is computed")
    options = parser.parse_args()
    model = MODEL if options.kind is None else parse_model_config(dict(KINDS[options.kind].fields))
    capture, has_rings = _nothing_recorded if options.eager else None, options.kind == RINGS
    computer = Computer(torch.device(options.device), capture=capture, has_rings=has_rings)
    problem = obstacle_of(computer, model=model)
    print(json.dumps({OK: problem is None, FAILURE: problem}), flush=True)


if __name__ == "__main__":
    main()
