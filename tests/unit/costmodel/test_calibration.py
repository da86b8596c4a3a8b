"""What a calibrated roofline charges beside the bounds, and how near that is to what others have measured."""

import pytest

from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.roofline import CALIBRATIONS, PLAIN, Calibration, RooflineModel
from alignedserve.costmodel.work import IterationWork
from benchmarks.simulation.calibration import chunk_ratios, error_of, overheads
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.published.files import rows_of
from tests.support.costs import decodes, prefill
from tests.support.marks import each

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
