"""Plain references for the kernels whose fast version is not plain itself: loops, one row at a time, float64."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import PLAIN_SCORES, ScoreForm


def attention(
    query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Compute attention of one query over one context.

    query [num_heads, head_dim]; keys, values [context, kv_heads, head_dim]; query head h reads key head
    h // (num_heads / kv_heads); sinks [num_heads]; see `kernels.attention.ScoreForm` -> [num_heads, head_dim] float64.
    """
    num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    attended = torch.empty(num_heads, head_dim, dtype=torch.float64)
    for head in range(num_heads):
        scores = keys[:, head // group].double() @ query[head].double() / math.sqrt(head_dim)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1].double()])
        weights = torch.softmax(scores, dim=0)[: len(keys)]
        attended[head] = weights @ values[:, head // group].double()
    return attended


def attention_of_chunk(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    form: ScoreForm = PLAIN_SCORES,
    *,
    is_chunked: bool = False,
    ends: Tensor | None = None,
) -> Tensor:
    """Compute attention of the last tokens of one context, each over the tokens up to itself.

    queries [tokens, num_heads, head_dim]; keys, values [context, kv_heads, head_dim]; a token reads the last `window`
    of its context, or, `is_chunked`, those since its last multiple; `ends` [tokens]: behind what each reads, if not
    behind itself -> [tokens, num_heads, head_dim] float64.
    """
    num_tokens, num_heads, head_dim = queries.shape
    own = torch.arange(len(keys) - num_tokens, len(keys))[:, None]
    others = torch.arange(len(keys))
    is_hidden = others > own if ends is None else others >= ends[:, None]
    if window is not None:
        is_hidden |= others < own // window * window if is_chunked else others <= own - window
    attended = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float64)
    for head in range(num_heads):
        key_head = head // (num_heads // keys.shape[1])
        scores = queries[:, head].double() @ keys[:, key_head].double().T / math.sqrt(head_dim)
        if form.cap is not None:
            scores = form.cap * torch.tanh(scores / form.cap)
        scores = scores.masked_fill(is_hidden, -math.inf)
        if form.sinks is not None:
            scores = torch.cat([scores, form.sinks[head].double().expand(num_tokens, 1)], dim=1)
        weights = torch.softmax(scores, dim=1)[:, : len(keys)]
        attended[:, head] = weights @ values[:, key_head].double()
    return attended


def penalised(
    logits: list[float],
    prompt: list[int],
    generated: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> list[float]:
    """Return the logits of one row after the penalties, token by token; see `kernels.sampling.penalise_`."""
    result = list(logits)
    for token_id in range(len(logits)):
        count = generated.count(token_id)
        if count or token_id in prompt:
            result[token_id] = result[token_id] / repetition if result[token_id] > 0 else result[token_id] * repetition
        if count:
            result[token_id] -= frequency * count + presence
    return result


def kept_tokens(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that the filters keep, token by token; see `kernels.sampling.sample`."""
    order = sorted(range(len(probabilities)), key=lambda token_id: -probabilities[token_id])
    highest = probabilities[order[0]]
    kept = [token_id for token_id in order if probabilities[token_id] >= min_p * highest]
    kept = kept[:top_k] if top_k else kept
    total = sum(probabilities[token_id] for token_id in kept)
    chosen: set[int] = set()
    mass = 0.0
    for token_id in kept:
        if chosen and mass >= top_p * total:
            break
        chosen.add(token_id)
        mass += probabilities[token_id]
    return chosen


def sample_tokens(logits: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample one token of each row, and whether it is usable; see `kernels.gpu.token_sampling.sample_tokens`."""
    token_ids = torch.zeros(len(logits), dtype=torch.int64)
    is_usable = torch.zeros(len(logits), dtype=torch.bool)
    for row, own in enumerate(logits.double().cpu()):
        temperature, top_k, top_p, min_p, draw = (column[row].item() for column in parameters)
        most = float(own.max())  # NaN where the row holds one
        is_usable[row] = math.isfinite(most)
        if not is_usable[row]:
            continue
        if temperature == 0.0:
            token_ids[row] = own.tolist().index(most)
            continue
        probabilities = torch.softmax(own / temperature, dim=0)
        is_dropped = torch.ones(len(own), dtype=torch.bool)
        is_dropped[list(kept_tokens(probabilities.tolist(), int(top_k), top_p, min_p))] = False
        is_filtered = top_k > 0 or top_p < 1.0 or min_p > 0.0
        order = probabilities.argsort(descending=True, stable=True) if is_filtered else torch.arange(len(own))
        cumulative = probabilities.masked_fill(is_dropped, 0.0)[order].cumsum(0)
        token_ids[row] = order[(cumulative > draw * cumulative[-1]).int().argmax()]
    return token_ids, is_usable
