"""Copies of block lists and digests of rows, against plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import block_digests
from kernels.block_digests import listed_digests, row_digests
from kernels.cpu.block_copies import all_rows, digest_blocks
from kernels.gpu import block_copies
from kernels.gpu import row_digests as gpu_row_digests
from kernels.gpu.block_copies import copy_listed, gather_blocks, scatter_blocks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("block_bytes", [8, 8192, 24008])
@pytest.mark.parametrize("ids", [[], [4], [3, 0, 8, 5]])
def test_block_lists_go_to_staging_and_back(ids: list[int], block_bytes: int, device: torch.device) -> None:
    blocks = torch.randint(0, 256, (9, block_bytes), dtype=torch.uint8, device=device)
    block_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    staging = torch.zeros((len(ids), block_bytes), dtype=torch.uint8, device=device)
    gather_blocks(blocks, block_ids, staging)
    assert torch.equal(staging, blocks[block_ids])
    others = torch.zeros_like(blocks)
    scatter_blocks(staging, others, block_ids)
    assert torch.equal(others[block_ids], blocks[block_ids])
    untouched = [block for block in range(9) if block not in ids]
    assert not others[untouched].any()


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("block_bytes", [8, 8192, 24008])
def test_listed_blocks_go_to_others(
    block_bytes: int, programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_copies, "_PEER_PROGRAMS", programs)
    blocks = torch.randint(0, 256, (9, block_bytes), dtype=torch.uint8, device=device)
    sources, targets = (torch.tensor(ids, device=device) for ids in ([3, 0, 8, 3, 5], [6, 1, 2, 0, 4]))
    others = torch.zeros((7, block_bytes), dtype=torch.uint8, device=device)
    copy_listed(blocks, sources, others, targets)
    assert torch.equal(others[targets], blocks[sources])
    assert not others[[3, 5]].any()
    copy_listed(blocks, sources[:0], others, targets[:0])


@pytest.mark.parametrize("width", [8, 1024, 4104, 40_008])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_digests_of_rows(count: int, width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 256, (count, width), dtype=torch.uint8, device=device)
    expected = digest_blocks(all_rows(rows.cpu().numpy())).tolist()
    assert [digest % (1 << 64) for digest in row_digests(rows).tolist()] == expected
    monkeypatch.setattr(block_digests, "fused_kernels", lambda *_: gpu_row_digests)
    assert [digest % (1 << 64) for digest in row_digests(rows).tolist()] == expected


@pytest.mark.parametrize("width", [8, 1024, 40_008])
@pytest.mark.parametrize("ids", [[], [4], [3, 0, 4, 1]])
def test_digests_of_listed_rows(
    ids: list[int], width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randint(0, 256, (5, width), dtype=torch.uint8, device=device)
    row_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    expected = row_digests(rows).cpu()[ids].tolist()
    assert listed_digests(rows, row_ids).tolist() == expected
    monkeypatch.setattr(block_digests, "fused_kernels", lambda *_: gpu_row_digests)
    assert listed_digests(rows, row_ids).tolist() == expected
