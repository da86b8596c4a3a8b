"""Fixtures of the GPU kernels' tests."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
