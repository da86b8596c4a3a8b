"""What adapters add to products on a GPU: against float64, alone and in any batch, recorded and replayed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.device.arrays import FixedArrays
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step_passes import CudaCapture
from alignedserve.runtime.lora.adapter_check import read_adapter_files
from alignedserve.runtime.lora.adapter_weights import load_adapter
from alignedserve.runtime.model.weights import product_reader as file_products
from kernels import gpu_dispatch, linear
from kernels.addend_layout import LayerProduct, ProductShape, site_of, up_column
from kernels.cpu.lora import LoraModule
from kernels.linear import Linear
from kernels.lora import AdapterMatrices, AdapterRows, DevicePlan, cut_tiles, device_kernels
from tests.support.fake_cuda import fake_cuda
from tests.support.marks import slow
from tests.support.models.lora_folders import LLAMA_TARGETS, write_adapter
from tests.support.models.tiny_engines import TinyEngine, capture_nothing, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

IN_WIDTH, PARTS, INNER = 70, (33, 17, 17), 37  # no multiples of a tile
SHAPES = (
    ProductShape(IN_WIDTH, sum(PARTS)),
    ProductShape(33, IN_WIDTH),
    ProductShape(IN_WIDTH, INNER, is_gated=True),
    ProductShape(1100, IN_WIDTH),  # in several runs of inputs
)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)


def random_module(first: int, columns: int, in_width: int, rank: int, generator: torch.Generator) -> LoraModule:
    a, b = torch.randn(rank, in_width, generator=generator), torch.randn(columns, rank, generator=generator)
    return LoraModule(first, columns, (a / 8, b / 8))


def make_adapter(
    seed: int, rank: int, dtype: torch.dtype, device: torch.device, products: Sequence[LayerProduct]
) -> tuple[AdapterMatrices, dict[LayerProduct, Tensor]]:
    """Return an adapter of the second of two layers, and what it adds to the weights of these products."""
    generator = torch.Generator().manual_seed(seed)
    adapter = AdapterMatrices(SHAPES, 2, dtype, device)
    deltas: dict[LayerProduct, Tensor] = {}
    for product in products:
        shape = SHAPES[product]
        parts = PARTS if product == LayerProduct.QKV else (shape.out_width,) * (1 + shape.is_gated)
        places = [sum(parts[:index]) for index in range(len(parts))]
        if shape.is_gated:
            places = [0, up_column(INNER)]
        modules = [
            random_module(place, columns, shape.in_width, rank + index, generator)
            for index, (place, columns) in enumerate(zip(places, parts, strict=True))
        ]
        if product == LayerProduct.QKV:
            modules[1] = LoraModule(PARTS[0], PARTS[1], None)
        adapter.set(site_of(1, product), modules)
        deltas[product] = torch.cat([_delta(module, shape.in_width) for module in modules])
    return adapter, deltas


def _delta(module: LoraModule, in_width: int) -> Tensor:
    if module.matrices is None:
        return torch.zeros(module.num_columns, in_width, dtype=torch.float64)
    a, b = module.matrices
    return b.double() @ a.double()


def product_of(x: Tensor, rows: AdapterRows, product: LayerProduct, weight: Tensor) -> Tensor:
    activation = "silu" if SHAPES[product].is_gated else None
    multiply = Linear(weight, allow_packing=False, activation=activation, is_gated=SHAPES[product].is_gated)
    return rows.product(site_of(1, product), multiply, x)


def expected(x: Tensor, weight: Tensor, product: LayerProduct) -> Tensor:
    result = x.double() @ weight.double().T
    if not SHAPES[product].is_gated:
        return result
    gates, ups = result.chunk(2, dim=1)
    return gates * torch.sigmoid(gates) * ups


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("product", list(LayerProduct))
def test_each_row_gets_what_its_own_adapter_adds(
    product: LayerProduct, dtype: torch.dtype, device: torch.device
) -> None:
    made = [
        make_adapter(1, 3, dtype, device, list(LayerProduct)),
        make_adapter(2, 18, dtype, device, [LayerProduct.QKV, LayerProduct.DOWN]),
        make_adapter(3, 8, dtype, device, list(LayerProduct)),
    ]
    adapters, deltas = [own[0] for own in made], [own[1] for own in made]
    of_row = np.array([2, -1, 0, 1, *[2] * 18, -1, 0], np.int64)
    shape = SHAPES[product]
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape.out_width * (1 + shape.is_gated), shape.in_width, generator=generator) / 8).to(dtype)
    x = torch.randn(len(of_row), shape.in_width + 3, generator=generator).to(device, dtype)[:, 2:-1]
    rows = AdapterRows(adapters, of_row, device)
    found = product_of(x, rows, product, weight.to(device)).double().cpu()
    for row, index in enumerate(of_row.tolist()):
        merged = weight.double()
        if index >= 0 and product in deltas[index]:
            merged = merged + deltas[index][product]
        own = expected(x[row : row + 1].cpu(), merged, product)[0]
        # Three roundings of sums that may be larger than the result.
        assert ((found[row] - own).abs() <= 6 * ROUNDING[dtype] * (own.abs() + 1.0)).all(), row


def test_a_product_takes_one_kernel_which_a_graph_replays_for_other_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.gpu.lora.multiprocessors", lambda device: 2)
    gpu, product, weight = torch.device("cuda", 0), LayerProduct.OUTPUT, torch.zeros(IN_WIDTH, 33)
    x = torch.randn(20, 33, generator=torch.Generator().manual_seed(0))
    with fake_cuda(pace=0.3) as fake:
        made = [make_adapter(seed, 1 + seed, torch.float32, gpu, [product]) for seed in range(2)]
        steps = [
            AdapterRows([adapter for adapter, _ in made], np.array(of_row, np.int64), gpu)
            for of_row in ([0] * 17 + [-1] * 3, [1, 0] * 10)
        ]
        fixed = FixedArrays(steps[0].host_arrays, gpu, last_size=steps[0].host_arrays[-1].size)
        own, rows, multiply = x.to(gpu), steps[0].bound(fixed.tensors), Linear(weight.to(gpu), allow_packing=False)
        results = torch.empty(20, IN_WIDTH, device=gpu)
        replay = CudaCapture()(lambda: results.copy_(rows.product(site_of(1, product), multiply, own)))
        fake.machine.counts.clear()
        for step in (*steps, *steps):
            fixed.fill(step.host_arrays)
            replay()
            for row, index in enumerate(step._indices.tolist()):
                wanted = x[row].double() @ made[index][1][product].T if index >= 0 else torch.zeros(IN_WIDTH)
                assert torch.allclose(results[row].cpu().double(), wanted.double(), atol=1e-5), (row, index)
        assert fake.machine.counts.names["_add_adapters"] == 4


def test_the_sizes_of_a_recorded_pass_depend_on_its_rows_alone(device: torch.device) -> None:
    shapes, own = [], [LayerProduct.OUTPUT]
    adapters = [make_adapter(seed, 1 + seed, torch.float32, device, own)[0] for seed in range(40)]
    for of_row in ([0] * 64, [*range(32), *[-1] * 32], [*range(30)] * 2 + [5] * 4):
        plan = AdapterRows(adapters, np.array(of_row, np.int64), device)
        assert plan.is_of_a_graph
        shapes.append([array.shape for array in plan.host_arrays])
    kernels = device_kernels(torch.float32, device)
    assert kernels is not None
    shapes.append([array.shape for array in DevicePlan(kernels, 64).host_arrays])
    assert all(own == shapes[0] for own in shapes)
    many = AdapterRows(adapters, np.array([*range(40), *[-1] * 24], np.int64), device)
    assert not many.is_of_a_graph, "more tiles than were recorded"


def test_rows_are_cut_into_tiles_of_one_adapter() -> None:
    head, queue, *tiles = cut_tiles([700, 800], [20, 23], 16, 5, 9).tolist()
    assert (head, queue) == ([3, 9, 0], [0, 0, 0])
    assert tiles == [[700, 0, 16], [700, 16, 4], [800, 20, 3], [0, 0, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    reference = make_tiny_model(folder, "llama")
    for seed, targets in ((1, LLAMA_TARGETS), (2, ("q_proj", "up_proj"))):
        write_adapter(folder / str(seed), reference, seed=seed, targets=targets, rank=3 + seed)
    return folder


def adapters_of(decoder: Decoder, folder: Path) -> dict[str, AdapterMatrices | None]:
    loaded = [
        load_adapter(
            read_adapter_files(folder / str(seed), 1 << 30), decoder.config, decoder.dtype, decoder.device, max_rank=64
        )
        for seed in (1, 2)
    ]
    return {"a": loaded[0], "b": None, "c": loaded[1]}


@pytest.mark.slow
def test_an_engine_with_recorded_steps_answers_as_native_kernels_do(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unpacked:  # as weights are on a GPU
        for module in (linear, file_products):
            unpacked.setattr(module, "packed_levels", lambda *_: ())
        unpacked.setattr(linear, "_has_onednn", lambda *_: False)
        decoder = tiny_decoder(folder, device=device)
    capture = None if device.type == "cuda" else capture_nothing
    tiny = TinyEngine(decoder, attention=TRITON, capture=capture, max_sequences=3)
    tiny.engine.record_graphs(has_adapters=True)
    graphs = tiny.engine._passes.graphs
    assert graphs is not None
    num_recorded = len(graphs._graphs)
    assert num_recorded == 2 * len(graphs.sizes), "with adapters and without"
    for name, adapter in adapters_of(decoder, folder).items():
        tiny.add(name, random_tokens(4, 9), adapter=adapter)
    tiny.step(a=4, b=9, c=9)
    tiny.step(a=5, b=1, c=1)
    for slices in ({"a": 1, "b": 1, "c": 1}, {"c": 1, "a": 1}, {"b": 1}, {"a": 1}):
        tiny.step(**slices)
    assert len(graphs._graphs) == num_recorded, "no step records another"
    monkeypatch.undo()
    plain = TinyEngine(tiny_decoder(folder), seed=3)
    for name, adapter in adapters_of(plain.engine.model, folder).items():
        plain.add(name, random_tokens(4, 9), adapter=adapter)
        plain.generate(name, len(tiny.tokens(name)) - 9)
        assert tiny.tokens(name) == plain.tokens(name)
