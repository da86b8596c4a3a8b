"""Recurrences of states: the native kernels and the plain form against float64, sequence by sequence."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.state_scans import GatedForm
from kernels.states import convolution, delta_rule, state_space
from kernels.states import delta_rule as gated_rows
from kernels.states.convolution import ConvolutionGates, causal_convolution
from kernels.states.delta_rule import GatedRows
from kernels.states.state_rows import NO_BLOCK, StateParts, StateRows

COUNTS = (5, 1, 9)
NUM_TOKENS, NUM_BLOCKS = sum(COUNTS), 8
# The first sequence goes on from block 6 and crosses into another; the second begins; the third goes on where it is.
ROWS = StateRows(
    np.array([0, 5, 6]),
    np.array([6, NO_BLOCK, 3]),
    StateParts(*(np.array(each) for each in ([2, 4, 5, 14], [0, 1, 2, 3], [8, 10, 1, 20], [0, 0, 1, 2]))),
)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=["native", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        for module in (state_space, delta_rule, convolution, gated_rows):
            monkeypatch.setattr(module, "scan_level", lambda *tensors: None)
    return str(request.param)


def _tokens(sequence: int) -> range:
    first = int(ROWS.firsts[sequence])
    return range(first, first + COUNTS[sequence])


def _before(states: Tensor, sequence: int) -> Tensor:
    source = int(ROWS.sources[sequence])
    return torch.zeros_like(states[0]).double() if source == NO_BLOCK else states[source].double()


def _check(states: Tensor, out: Tensor, expected: Tensor, left: dict[int, Tensor]) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for token, state in left.items():
        block = int(ROWS.targets[ROWS.ends.tolist().index(token)])
        torch.testing.assert_close(states[block].double(), state, rtol=1e-5, atol=1e-5)


def test_state_space(form: str) -> None:
    heads, width, groups, size = 4, 48, 2, 6
    rows, states = _random(NUM_TOKENS, heads * width + 2 * groups * size), _random(NUM_BLOCKS, heads, size, width)
    x, b, c = rows.split_with_sizes((heads * width, groups * size, groups * size), dim=1)
    dt, decay, skip = _random(NUM_TOKENS, heads).abs(), _random(NUM_TOKENS, heads).sigmoid(), _random(heads)
    expected, left = torch.empty(NUM_TOKENS, heads, width).double(), {}
    for sequence in range(len(COUNTS)):
        state = _before(states, sequence)
        for token in _tokens(sequence):
            own = x[token].double().view(heads, width)
            writes, reads = (each[token].double().view(groups, size).repeat_interleave(2, 0) for each in (b, c))
            state = decay[token].double()[:, None, None] * state
            state = state + (dt[token].double()[:, None] * writes)[..., None] * own[:, None]
            expected[token] = (reads[:, None] @ state)[:, 0] + skip.double()[:, None] * own
            left[token] = state
    out = state_space.scan((x, b, c), (dt, decay), skip, ROWS, states)
    _check(states, out, expected, {token: left[token] for token in ROWS.ends.tolist()})


def test_delta_rule(form: str) -> None:
    heads, width, key_heads, size = 4, 80, 2, 32
    rows, states = _random(NUM_TOKENS, 2 * key_heads * size + heads * width), _random(NUM_BLOCKS, heads, size, width)
    q, k, v = rows.split_with_sizes((key_heads * size, key_heads * size, heads * width), dim=1)
    beta, decay = _random(NUM_TOKENS, heads).sigmoid(), (_random(NUM_TOKENS, heads) + 1).sigmoid()
    expected, left = torch.empty(NUM_TOKENS, heads, width).double(), {}
    for sequence in range(len(COUNTS)):
        state = _before(states, sequence)
        for token in _tokens(sequence):
            units = [each[token].double().view(key_heads, size).repeat_interleave(2, 0) for each in (q, k)]
            query, key = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in units)
            state = decay[token].double()[:, None, None] * state
            change = v[token].double().view(heads, width) - (key[:, None] @ state)[:, 0]
            state = state + key[..., None] * (beta[token].double()[:, None] * change)[:, None]
            expected[token] = (query[:, None] @ state)[:, 0] / size**0.5
            left[token] = state
    out = delta_rule.scan((q, k, v), (beta, decay), ROWS, states)
    _check(states, out, expected, {token: left[token] for token in ROWS.ends.tolist()})


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("has_gates", [False, True])
def test_convolution(form: str, size: int, has_gates: bool) -> None:
    channels = 80
    x, before, behind = _random(NUM_TOKENS, 3 * channels).chunk(3, dim=1)
    gates = ConvolutionGates(before, behind) if has_gates else None
    weight, bias, tails = _random(size, channels), _random(channels), _random(NUM_BLOCKS, size - 1, channels)
    expected, left = torch.empty(NUM_TOKENS, channels).double(), {}
    for sequence in range(len(COUNTS)):
        known = [*_before(tails, sequence)]
        for token in _tokens(sequence):
            own = x[token].double() * (before[token].double() if has_gates else 1.0)
            known.append(own)
            result = (torch.stack(known[-size:]) * weight.double()).sum(0) + bias.double()
            expected[token] = result * (behind[token].double() if has_gates else result.sigmoid())
            left[token] = torch.stack(known[1 - size :])
    out = causal_convolution(x, weight, bias, ROWS, tails, gates)
    _check(tails, out, expected, {token: left[token] for token in ROWS.ends.tolist()})


def test_a_convolution_in_bfloat16_is_the_same_bits_however_rows_are_cut() -> None:
    """With gates, as layers of short convolutions have them: token by token through the state, and all at once."""
    count, channels, size = 11, 320, 3
    rows = _random(count, 3 * channels).bfloat16()
    weight, tails = _random(size, channels), torch.zeros(1, size - 1, channels, dtype=torch.bfloat16)

    def computed(first: int, last: int) -> Tensor:
        source, number = (NO_BLOCK if first == 0 else 0), last - first
        own = StateRows(
            np.array([0]), np.array([source]), StateParts(*(np.array([each]) for each in (number - 1, 0, last, 0)))
        )
        x, before, behind = rows[first:last].chunk(3, dim=1)
        return causal_convolution(x, weight, None, own, tails, ConvolutionGates(before, behind))

    whole, left = computed(0, count), tails.clone()
    assert torch.equal(torch.cat([computed(token, token + 1) for token in range(count)]), whole)
    assert torch.equal(tails, left)


@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_gated_rows(form: str, gates_first: bool, has_norm: bool) -> None:
    groups, width, eps = 3, 48, 1e-5
    x, gates = _random(NUM_TOKENS, groups * width), _random(NUM_TOKENS, groups * width + 5)[:, 2:-3]
    weight = _random(groups * width) if has_norm else None
    expected, factors = x.double(), gates.double() * gates.double().sigmoid()
    if gates_first or weight is None:
        expected = expected * factors
    if weight is not None:
        by_group = expected.view(NUM_TOKENS, groups, width)
        expected = by_group / (by_group.square().mean(-1, keepdim=True) + eps).sqrt()
        expected = expected.reshape(x.shape) * weight.double()
        expected = expected if gates_first else expected * factors
    out = GatedRows(groups * width, weight, GatedForm(groups, eps, gates_first))(x.clone(), gates, ROWS)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
