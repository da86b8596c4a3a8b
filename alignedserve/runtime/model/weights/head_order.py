"""The order of a head's rows: as files have them, and as the kernels do."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.model_config import ModelConfig


def pairs_apart(rows: Tensor, config: ModelConfig) -> Tensor:
    """Reorder rows of heads [heads * head_dim, ...] where a rotated pair is neighbours: the kernels have its two rows
    half of the rotated ones apart.

    Example: of a head of 6 rows, 4 of them rotated, come rows 0, 2, 1, 3, 4, 5.
    """
    rotated = config.head_dim if config.rope is None else config.rope.rotary_dim
    order = torch.arange(config.head_dim, device=rows.device)
    order[:rotated] = torch.cat([order[:rotated:2], order[1:rotated:2]])
    heads = rows.view(-1, config.head_dim, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


def gates_first(rows: Tensor) -> Tensor:
    return torch.cat([rows[::2], rows[1::2]])


def rotated_first(rows: Tensor, rope_dim: int, num_heads: int, *, is_paired: bool) -> Tensor:
    """Reorder rows of heads [heads * width, ...] whose last `rope_dim` are rotated: the kernels have them first, and
    the two of a pair half of them apart. `is_paired`: in `rows` they are neighbours."""
    heads = rows.view(num_heads, -1, *rows.shape[1:])
    plain, turned = heads[:, :-rope_dim], heads[:, -rope_dim:]
    if is_paired:
        turned = torch.cat([turned[:, ::2], turned[:, 1::2]], dim=1)
    return torch.cat([turned, plain], dim=1).reshape(rows.shape)


def heads_to_qkv(rows: Tensor, config: ModelConfig) -> Tensor:
    shape = (config.num_heads, 3, config.head_dim, -1)
    return rows.view(shape).transpose(0, 1).reshape(rows.shape)


def halves_of_heads(rows: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Divide rows of heads [heads * 2 * head_dim, ...] into the first halves of all heads, and the second ones."""
    heads = rows.view(-1, 2, head_dim, *rows.shape[1:])
    return heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)


def parts_of_key_heads(rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Reorder rows that lie key head by key head, each in parts of these widths: the kernels have each part of all
    heads in one place."""
    heads = rows.view(-1, sum(widths), *rows.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in heads.split_with_sizes(list(widths), dim=1)])


def pairs_of_rows_first(rows: Tensor, head_dim: int, *, are_neighbours: bool) -> Tensor:
    """Reorder rows of heads [heads * head_dim, ...] that turn by a patch's column first: the kernels have those first
    that turn by its row, and the two rows of a pair half a head apart. `are_neighbours`: in `rows` a pair's are side by
    side; False: a quarter of a head apart.

    Example: of a head of 8 rows come rows 4, 6, 0, 2, 5, 7, 1, 3; or 4, 5, 0, 1, 6, 7, 2, 3.
    """
    places = torch.arange(head_dim, device=rows.device)
    pairs = places.view(-1, 2) if are_neighbours else places.view(2, 2, -1).transpose(1, 2).reshape(-1, 2)
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    return heads[:, pairs.roll(head_dim // 4, 0).T.flatten()].reshape(rows.shape)
