"""Model shapes, accelerators, links, cache memory, and the roofline over them."""

from dataclasses import replace

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.gpu_limits import gpu_of, running_requests
from alignedserve.costmodel.hardware import HARDWARE, LinkModel, hardware, nvlink_link, pcie_link
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.model_shapes import MODEL_SHAPES, ModelShape, model_shape, num_cache_blocks
from alignedserve.costmodel.roofline import CALIBRATIONS, PLAIN, Calibration, Efficiency, RooflineModel
from alignedserve.costmodel.work import IterationWork
from benchmarks.simulation.calibration import chunk_ratios, error_of, overheads
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.published.files import rows_of
from lab.costmodel.published.llama_layers import Curve, collective_curve
from lab.costmodel.shared_experts import ExpertSharing
from lab.profiling.shapes import OPT_125M
from tests.support.costs import decodes, prefill
from tests.support.marks import each

A100 = HARDWARE["a100-80g"]
PERFECT = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)


@each(
    ("name", "billions"),
    [
        ("opt-125m", 0.125),
        ("opt-2.7b", 2.65),
        ("opt-6.7b", 6.66),
        ("opt-13b", 12.85),
        ("opt-30b", 29.97),
        ("opt-66b", 65.7),
        ("opt-175b", 174.6),
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("bloom-176b", 176.2),
    ],
)
def test_every_shape_has_the_parameters_of_its_model(name: str, billions: float) -> None:
    assert MODEL_SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_what_follows_from_a_shape() -> None:
    shape = model_shape("opt-13b")
    assert (shape.kv_token_bytes, shape.hidden_ratio) == (819200, 0.5)
    assert shape.token_flops == 2 * 40 * 12 * 5120**2
    assert shape.pair_flops == 4 * 40 * 5120
    assert shape.projection_flops * 6 == shape.token_flops  # two of twelve square matrices
    assert model_shape("opt-13b", "float32").kv_token_bytes == 1638400


def test_a_hidden_cache_does_not_pay_where_queries_share_keys() -> None:
    assert [model_shape(name).hidden_ratio for name in ("llama-2-13b", "llama-3-8b", "llama-2-70b")] == [0.5, 2.0, 4.0]


def test_the_shape_of_a_config_is_that_of_the_table() -> None:
    assert OPT_125M.shape("opt-125m", "float16") == model_shape("opt-125m")


def test_links() -> None:
    assert LinkModel(1e-5, 1e9).transfer_s(5e6) == pytest.approx(0.00501)
    assert LinkModel(1e-5, 1e9).transfer_s(0) == 0.0
    assert pcie_link(A100).bytes_per_s == pytest.approx(25.6e9)


@each("name", ["a100-80g", "h100"])
def test_nvlink_is_as_fast_as_measured(name: str) -> None:
    for num_bytes in (1 << 22, 1 << 24, 1 << 26):
        measured = collective_curve(name, "send_recv", 2).at(num_bytes)
        assert nvlink_link(hardware(name)).transfer_s(num_bytes) == pytest.approx(measured, rel=0.3)


def test_a_curve() -> None:
    curve = Curve([(1, 2.0), (2, 1.0), (4, 5.0)])  # the dip counts as 2
    assert [curve.at(x) for x in (0, 1, 2, 3, 4, 6)] == [2.0, 2.0, 2.0, 3.5, 5.0, 8.0]


def test_blocks_beside_a_model() -> None:
    """0.9 * 80 GiB - 25.7 GB of weights - 8 192 * (2 * 5 120 + 20 480) * 2 B, by 16 * 819 200 B."""
    shape = model_shape("opt-13b")
    room = 0.9 * (80 << 30) - shape.weight_bytes - 8192 * 30720 * 2
    assert num_cache_blocks(shape, A100) == int(room // (16 * 819200)) == 3898
    assert num_cache_blocks(shape, A100, tensor_parallel=2) > 2 * 3898
    with pytest.raises(ConfigError, match="does not fit 1 x 'a100-80g'"):
        num_cache_blocks(model_shape("opt-66b"), A100)


def test_a_prefill_is_bound_by_flops_and_a_decode_by_bytes() -> None:
    shape = model_shape("opt-13b")
    costs = RooflineModel(shape, A100, efficiency=PERFECT)
    head_s = shape.head_parameters * 2 / 2039e9
    flops = 2048 * shape.token_flops + 2048 * 2049 // 2 * shape.pair_flops
    assert costs.iteration_s(prefill(2048)) == pytest.approx(flops / 312e12 + head_s)
    num_bytes = shape.layer_parameters * 2 + 8 * 500 * 819200
    assert costs.iteration_s(decodes(8, 500)) == pytest.approx(num_bytes / 2039e9 + head_s)


def test_a_token_of_a_large_prompt_is_far_cheaper_than_a_decode_alone() -> None:
    costs = RooflineModel(model_shape("opt-13b"), A100)
    token_s = costs.iteration_s(prefill(1024)) / 1024
    assert 80 < costs.iteration_s(decodes(1, 1024)) / token_s < 250


def test_balanced_attention_and_waves_agree_on_equal_lengths_and_differ_on_mixed_ones() -> None:
    shape = model_shape("opt-13b")
    kernels = AttentionKernel.LOAD_BALANCED, AttentionKernel.ONE_BLOCK_PER_SEQUENCE
    balanced, straggling = (RooflineModel(shape, A100, kernel=kernel) for kernel in kernels)
    equal = decodes(108, 1000)  # 108 * 40 heads fill 108 multiprocessors evenly
    assert straggling.iteration_s(equal) == pytest.approx(balanced.iteration_s(equal))
    mixed = decodes(107, 100)
    mixed.add_decode(1000)
    assert straggling.iteration_s(mixed) == pytest.approx(balanced.iteration_s(equal))
    assert balanced.iteration_s(mixed) < 0.6 * straggling.iteration_s(mixed)


def test_a_hidden_cache_costs_its_projection_and_saves_bytes() -> None:
    shape = model_shape("opt-13b")
    costs = RooflineModel(shape, A100, efficiency=PERFECT)
    plain, hidden = decodes(8, 500), decodes(7, 500)
    hidden.add_decode(500, is_hidden=True)
    more = 500 * shape.projection_flops / 312e12 - 500 * 819200 / 2 / 2039e9
    assert costs.iteration_s(hidden) - costs.iteration_s(plain) == pytest.approx(more)
    assert more > 0.0


def test_copies_overlap_with_the_pass() -> None:
    costs = RooflineModel(model_shape("opt-13b"), A100)
    work = decodes(8, 500)
    alone = costs.iteration_s(work)
    work.swap_in_tokens = 100.0
    assert costs.iteration_s(work) == alone
    work.swap_out_tokens = 1e4
    assert costs.iteration_s(work) == costs.swap_s(10100) == pytest.approx(10100 * 819200 / 25.6e9)


def test_more_accelerators_are_faster_but_not_in_proportion() -> None:
    one, four = (RooflineModel(model_shape("opt-13b"), A100, tensor_parallel=degree) for degree in (1, 4))
    for work in (prefill(1024), decodes(32, 1000)):
        assert one.iteration_s(work) / 4 < four.iteration_s(work) < one.iteration_s(work)


def test_experts_cost_the_products_of_a_few_and_the_bytes_of_those_that_are_met() -> None:
    """Mixtral-8x7B (config.json): 8 experts, of which a token passes 2."""
    shape = ModelShape(
        "mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, is_gated=True, ties_embeddings=False, dtype="bfloat16",
        num_experts=8, num_chosen_experts=2, expert_size=14336, num_expert_layers=32,
    )  # fmt: skip
    assert shape.num_parameters / 1e9 == pytest.approx(46.7, rel=0.005)
    assert (shape.token_parameters + 2 * shape.head_parameters) / 1e9 == pytest.approx(12.9, rel=0.005)
    costs = RooflineModel(shape, A100, tensor_parallel=2, efficiency=PERFECT)
    bytes_per_s, flops_per_s = 2 * 2039e9, 2 * 312e12
    assert costs.layers_s(1) == pytest.approx(2 * shape.token_parameters / bytes_per_s)
    assert costs.layers_s(2) == pytest.approx(2 * shape.read_parameters(2) / bytes_per_s)
    assert costs.layers_s(4096) == pytest.approx(2 * shape.token_parameters * 4096 / flops_per_s)
    assert costs.layers_s(0) == 0.0


def test_stages_compute_faster_and_read_weights_no_faster() -> None:
    one, two = (
        RooflineModel(model_shape("opt-13b"), A100, pipeline_parallel=size, efficiency=replace(PERFECT, hop_s=0.0))
        for size in (1, 2)
    )
    assert two.layers_s(4096) == pytest.approx(one.layers_s(4096) / 2)
    assert two.layers_s(8) == pytest.approx(one.layers_s(8))
    assert two.swap_s(1000) == pytest.approx(one.swap_s(1000) / 2)


CALIBRATED = CALIBRATIONS["calibrated"]


def test_a_chunk_is_charged_for_more_than_its_pairs() -> None:
    """168 queries by 1 240 keys; the mask hides half of the last 100 keys, and saves nothing."""
    work = IterationWork()
    work.add_chunk(100, 400, is_last=False)
    assert PLAIN.charged_pairs(work) == 45050
    assert Calibration(chunk_flops=0.483, more_queries=68, more_keys=740).charged_pairs(work) == 168 * 1240
    work.add_chunk(50, 0, is_last=True)
    charged = Calibration(chunk_flops=0.483, more_queries=68, more_keys=740).charged_pairs(work)
    assert charged == 168 * 1240 + 118 * 790


def test_work_that_is_taken_out_again_costs_nothing() -> None:
    work, other = prefill(100, 400), prefill(50)
    before = CALIBRATED.charged_pairs(work)
    work.add_chunk(50, 0, is_last=True)
    work.subtract(other)
    assert CALIBRATED.charged_pairs(work) == before


@each("machine", ["a100-80g", "h100"])
def test_tokens_beside_decodes_are_not_for_nothing(machine: str) -> None:
    """96 to 192 tokens through a layer: plain, the weights hide them; measured, they take up to half as long again."""
    shape = model_shape("llama-2-13b")
    plain, calibrated = (
        RooflineModel(shape, hardware(machine), calibration=calibration) for calibration in (PLAIN, CALIBRATED)
    )
    rows = [row for row in rows_of("layers_by_tokens.csv") if (row["model"], row["hardware"]) == (shape.name, machine)]
    small = [(int(row["num_tokens"]), float(row["layer_ms"])) for row in rows if 96 <= int(row["num_tokens"]) <= 192]
    found = [[1e3 * costs.layers_s(num) / shape.num_layers / ms for num, ms in small] for costs in (plain, calibrated)]
    assert min(found[0]) < 0.75
    assert all(0.8 < ratio < 1.15 for ratio in found[1])


def test_attention_of_chunks_is_near_what_was_measured() -> None:
    assert error_of(chunk_ratios(CALIBRATED)).median < 0.15
    assert error_of(chunk_ratios(PLAIN)).median > 0.4


def test_small_chunks_take_longer_than_their_tokens() -> None:
    """Yi-34B on two A100: chunks of 512 take 15 to 24 % longer than chunks of 2 048; by plain costs 4, here 7."""
    calibrated = [row for row in overheads(CALIBRATED) if row["chunk"] == 512]
    plain = [row for row in overheads(PLAIN) if row["chunk"] == 512]
    for row, same in zip(calibrated, plain, strict=True):
        assert row["measured"] > 0.14
        assert abs(row["by_model"] - row["measured"]) < abs(same["by_model"] - row["measured"])


def test_prompts_and_decodes_take_from_each_other() -> None:
    costs = {name: make_cost_model(name, WorkerSpec("llama-2-13b")) for name in ("calibrated", "contended")}
    both = decodes(32, 1500)
    both.add_chunk(256, 1024, is_last=False)
    for alone in (decodes(32, 1500), prefill(256, 1024)):
        assert costs["calibrated"].iteration_s(alone) == costs["contended"].iteration_s(alone)
    assert costs["contended"].iteration_s(both) > 1.1 * costs["calibrated"].iteration_s(both)
    with pytest.raises(AssertionError, match="cheaper by more work"):
        Calibration(beside=0.9)


# How many requests a GPU runs at a time: what its memory has room for, as long as an iteration is quick enough.

LLAMA = replace(model_shape("llama-3-8b"), dtype="bfloat16")
CARDS = {  # multiprocessors, and clocks of datasheets: of the processor, of the memory, bits of the bus
    "a100-40g": ((8, 0), 108, 1.41e9, 1215e6, 5120),
    "a100-80g": ((8, 0), 108, 1.41e9, 1593e6, 5120),
    "h100": ((9, 0), 132, 1.83e9, 2619e6, 5120),
    "h200": ((9, 0), 132, 1.83e9, 3201e6, 6144),
}


@pytest.mark.parametrize(
    ("gpu", "num_tokens", "expected"),
    [
        ("h100", 427_000, 1024),
        ("a100-80g", 427_000, 736),  # 100 ms an iteration
        ("h100", 36_000, 128),
        ("h100", 9_000, 35),
        ("h100", 100, 1),
    ],
)
def test_memory_and_time_decide(gpu: str, num_tokens: int, expected: int) -> None:
    assert running_requests(num_tokens, RooflineModel(LLAMA, HARDWARE[gpu])) == expected


def test_without_costs_memory_decides() -> None:
    assert (running_requests(427_000, None), running_requests(50_000, None)) == (1024, 192)


def test_a_model_that_is_slow_anyway_runs_a_few() -> None:
    slow = replace(HARDWARE["a100-40g"], memory_bytes_per_s=1e10)
    assert running_requests(427_000, RooflineModel(LLAMA, slow)) == 64


@pytest.mark.parametrize("name", list(CARDS))
def test_what_a_driver_says_gives_the_rates_of_the_datasheet(name: str) -> None:
    capability, count, clock, memory, bits = CARDS[name]
    sizes = {"num_multiprocessors": count, "memory_bytes": 1, "bus_bits": bits}
    found = gpu_of(name, capability, clock_hz=clock, memory_hz=memory, **sizes)
    assert found is not None
    assert found.memory_bytes_per_s == pytest.approx(HARDWARE[name].memory_bytes_per_s, rel=0.03)
    assert found.flops_per_s["bfloat16"] == pytest.approx(HARDWARE[name].flops_per_s["bfloat16"], rel=0.01)
    assert gpu_of(name, (3, 5), clock_hz=clock, memory_hz=memory, **sizes) is None
    assert gpu_of(name, capability, clock_hz=0.0, memory_hz=memory, **sizes) is None


# Processes that share experts: what each has in memory, what they exchange, and what is gained.

SHAPE = ModelShape(
    "mixture", 4, 64, 4, 4, 16, 0, 512, is_gated=True, ties_embeddings=True, dtype="float32",
    num_experts=6, num_chosen_experts=2, expert_size=128, num_expert_layers=4,
)  # fmt: skip
COSTS = LinearCoefficients(base_s=0.02, prompt_token_s=1e-4, decode_s=1e-4, context_token_s=1e-7)


def test_each_expert_is_in_one_process_and_all_else_in_the_first() -> None:
    expert_bytes = 4 * 3 * 64 * 128 * 4  # of one expert on all layers
    for size in (2, 3, 4):
        memory = ExpertSharing(SHAPE, size).memory_bytes
        assert sum(memory) == SHAPE.weight_bytes
        assert memory[0] > SHAPE.weight_bytes - 6 * expert_bytes
        assert all(part % expert_bytes == 0 for part in memory[1:])
    assert ExpertSharing(SHAPE, 4).memory_bytes[1:] == [2 * expert_bytes, expert_bytes, 2 * expert_bytes]


def test_rows_of_chosen_experts_travel_there_and_back() -> None:
    sharing = ExpertSharing(SHAPE, 2, LinkModel(1e-4, 1e6))
    row_bytes = 64 * 4
    assert sharing.layer_s(10) == pytest.approx(1e-4 + 10 * 2 * (2 * 0.5) * row_bytes / 1e6)
    assert sharing.exchange_s(10) == pytest.approx(4 * sharing.layer_s(10))


def test_an_iteration_takes_less_but_never_less_than_what_is_not_shared() -> None:
    work = IterationWork()
    work.add_decodes(16, 16 * 100, 100)
    alone = LinearIterationModel(COSTS).iteration_s(work)
    free, last = LinkModel(0.0, 1e15), alone
    for size in (2, 3, 6):
        shared_s = LinearIterationModel(ExpertSharing(SHAPE, size, free).shared(COSTS)).iteration_s(work)
        assert alone * SHAPE.dense_parameters / SHAPE.layer_parameters < shared_s < last
        last = shared_s
    slow = ExpertSharing(SHAPE, 2, LinkModel(0.1, 1e6)).shared(COSTS)
    assert LinearIterationModel(slow).iteration_s(work) > alone + 4 * 0.1 - COSTS.base_s


def test_a_token_does_not_choose_evenly() -> None:
    sharing = ExpertSharing(SHAPE, 2)
    assert 0.65 < sharing.busiest_share(1) < 0.8  # of two experts both are in one process as often as not
    assert sharing.busiest_share(1000) == pytest.approx(0.5)


def test_where_they_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="mixture has 6 experts, whole in one process each"):
        ExpertSharing(SHAPE, 7).check()
    with pytest.raises(ConfigError, match=r"2 processes of 3 threads .* has 4 cores"):
        ExpertSharing(SHAPE, 2).check(3, 4)
    with pytest.raises(ConfigError, match="no experts"):
        ExpertSharing(replace(SHAPE, num_expert_layers=0), 2).check()
