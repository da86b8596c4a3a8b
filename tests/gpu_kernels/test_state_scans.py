"""Layers with a state on a GPU against the plain forms in float64, sequence by sequence, in one pass and in two."""

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import to_device
from kernels.cpu.state_scans import GatedForm
from kernels.states import delta_rule, state_space
from kernels.states.convolution import ConvolutionGates, causal_convolution
from kernels.states.delta_rule import GatedRows
from kernels.states.state_rows import NO_BLOCK, StateParts, StateRows

pytest.importorskip("triton")

from kernels.gpu import state_convolutions, state_scans
from kernels.states.state_rows import DeviceStatePlan, DeviceStateRows, StateKernels

pytestmark = pytest.mark.slow

COUNTS = (5, 1, 9)
NUM_TOKENS, NUM_BLOCKS = sum(COUNTS), 8
# The first sequence goes on from block 6 and crosses into another; the second begins; the third goes on where it is.
ROWS = StateRows(
    np.array([0, 5, 6]),
    np.array([6, NO_BLOCK, 3]),
    StateParts(*(np.array(each) for each in ([2, 4, 5, 14], [0, 1, 2, 3], [8, 10, 1, 20], [0, 0, 1, 2]))),
)
TOLERANCE = 2e-5


def randoms(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def placed(device: torch.device) -> DeviceStateRows:
    plan = DeviceStatePlan(StateKernels(state_scans, state_convolutions), ROWS)
    return plan.bound([tensor.flatten() for tensor in to_device(plan.host_arrays, device)])


def three(rows: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = rows.split_with_sizes(sizes, dim=1)
    return first, second, third


def states_of(*shape: int) -> Tensor:
    """Draw states, and numbers that are none where no sequence has any."""
    states = randoms(NUM_BLOCKS, *shape)
    states[[block for block in range(NUM_BLOCKS) if block not in (3, 6)]] = float("nan")
    return states


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare results, and the states in the blocks that are written."""
    for (own, wanted), at in zip(zip(found, expected, strict=True), (slice(None), slice(0, 4)), strict=True):
        torch.testing.assert_close(own[at].double().cpu(), wanted[at].double(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("heads", "key_heads", "size", "width"), [(4, 2, 16, 32), (4, 2, 32, 80), (4, 4, 128, 128)])
def test_delta_rule(heads: int, key_heads: int, size: int, width: int, device: torch.device) -> None:
    keys, values = key_heads * size, heads * width
    rows, states = randoms(NUM_TOKENS, 2 * keys + values), states_of(heads, size, width)
    gates = randoms(NUM_TOKENS, heads).sigmoid(), (randoms(NUM_TOKENS, heads) + 1).sigmoid()
    own, theirs = states.to(device), states.double()
    found = delta_rule.scan(
        three(rows.to(device), (keys, keys, values)),
        (gates[0].to(device), gates[1].to(device)),
        placed(device),
        own,
    )
    expected = delta_rule.scan(
        three(rows.double(), (keys, keys, values)),
        (gates[0].double(), gates[1].double()),
        ROWS,
        theirs,
    )
    check((found, own), (expected, theirs))


@pytest.mark.parametrize(("heads", "groups", "size", "width"), [(4, 2, 12, 32), (4, 1, 6, 48), (8, 1, 128, 64)])
def test_state_space(heads: int, groups: int, size: int, width: int, device: torch.device) -> None:
    inner, shared = heads * width, groups * size
    rows, states = randoms(NUM_TOKENS, inner + 2 * shared), states_of(heads, size, width)
    gates, skip = (randoms(NUM_TOKENS, heads).abs(), randoms(NUM_TOKENS, heads).sigmoid()), randoms(heads)
    own, theirs = states.to(device), states.double()
    found = state_space.scan(
        three(rows.to(device), (inner, shared, shared)),
        (gates[0].to(device), gates[1].to(device)),
        skip.to(device),
        placed(device),
        own,
    )
    expected = state_space.scan(
        three(rows.double(), (inner, shared, shared)),
        (gates[0].double(), gates[1].double()),
        skip.double(),
        ROWS,
        theirs,
    )
    check((found, own), (expected, theirs))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("has_gates", [False, True])
def test_convolution(size: int, has_gates: bool, device: torch.device) -> None:
    channels = 200
    rows = randoms(NUM_TOKENS, 3 * channels)
    weight, bias, tails = randoms(size, channels), randoms(channels), states_of(size - 1, channels)

    def convolved(rows: Tensor, sequences: StateRows | DeviceStateRows, tails: Tensor) -> Tensor:
        x, *gates = rows.chunk(3, dim=1)
        own = (weight.to(rows.device), bias.to(rows.device))
        return causal_convolution(x, *own, sequences, tails, ConvolutionGates(*gates) if has_gates else None)

    own, theirs = tails.to(device), tails.clone()
    check(
        (convolved(rows.to(device), placed(device), own), own),
        (convolved(rows, ROWS, theirs), theirs),
    )


@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
def test_gates(has_norm: bool, gates_first: bool, device: torch.device) -> None:
    groups, width = 3, 80
    x, gates = randoms(NUM_TOKENS, groups * width), randoms(NUM_TOKENS, 2 * groups * width)[:, groups * width :]
    weight, form = randoms(groups * width) if has_norm else None, GatedForm(groups, 1e-5, gates_first)
    expected = GatedRows(groups * width, weight, form)(x.clone(), gates, ROWS)
    own = GatedRows(groups * width, None if weight is None else weight.to(device), form)
    found = own(x.to(device), gates.to(device), placed(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)
