"""What requests of some forms bring along: LoRA adapters, and masks of grammars."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.grammar.token_masks import StepMasks, TokenMasks
from alignedserve.runtime.lora.adapter_check import product_shapes
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from benchmarks.gpu.ledger.forms import GPU
from kernels.addend_layout import LayerProduct, ProductShape, site_of, up_column
from kernels.cpu.lora import LoraModule
from kernels.lora import AdapterMatrices

_RANK = 16


def empty_adapter(config: ModelConfig, dtype: torch.dtype) -> AdapterMatrices:
    """Return an adapter of rank 16 of every product, whose matrices have no content."""
    shapes = product_shapes(config)
    adapter = AdapterMatrices(shapes, config.num_layers, dtype, GPU)
    for layer in range(config.num_layers):
        for product, shape in zip(LayerProduct, shapes, strict=True):
            adapter.set(site_of(layer, product), [_module(shape, *part) for part in _parts(config, product, shape)])
    return adapter


def _parts(config: ModelConfig, product: LayerProduct, shape: ProductShape) -> list[tuple[int, int]]:
    if product is LayerProduct.QKV:
        query, kv = config.query_width, config.kv_width
        return [(0, query), (query, kv), (query + kv, kv)]
    if shape.is_gated:
        return [(0, shape.out_width), (up_column(shape.out_width), shape.out_width)]
    return [(0, shape.out_width)]


def _module(shape: ProductShape, first_column: int, num_columns: int) -> LoraModule:
    a = torch.empty((_RANK, shape.in_width), dtype=torch.float32, device=GPU)
    b = torch.empty((num_columns, _RANK), dtype=torch.float32, device=GPU)
    return LoraModule(first_column, num_columns, (a, b))


class AllAllowed(TokenMasks):
    """Masks of grammars that allow every token, ready at once; every row has one."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)

    @override
    def has_any(self, rows: IntArray) -> bool:
        return len(rows) > 0

    @override
    def start(self, rows: IntArray, is_early: Any) -> "Future[StepMasks]":
        del is_early
        masks: Future[StepMasks] = Future()
        masks.set_result(StepMasks(np.arange(len(rows)), np.full((len(rows), self._words), -1, np.int32)))
        return masks

    @override
    def remove(self, row: int) -> None:
        del row

    @override
    def record(self, rows: IntArray, chosen: IntArray) -> None:
        del rows, chosen

    @property
    @override
    def may_force(self) -> bool:
        return False

    @override
    def failure(self, row: int) -> str | None:
        del row
        return None
