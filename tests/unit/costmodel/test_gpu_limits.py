"""How many requests a GPU runs at a time: what its memory has room for, as long as an iteration is quick enough."""

from dataclasses import replace

import pytest

from alignedserve.costmodel.gpu_limits import gpu_of, running_requests
from alignedserve.costmodel.hardware import HARDWARE
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.roofline import RooflineModel

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
