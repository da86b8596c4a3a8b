"""Fixtures of the tests of the GPU kernels."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
