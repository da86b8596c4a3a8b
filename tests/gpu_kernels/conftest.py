"""Fixtures of the tests of the GPU kernels."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is not None:
    from tests.support.devices.quick_interpreter import patch_once_per_kernel

    patch_once_per_kernel()


@pytest.fixture
def device() -> torch.device:
    """The device on which kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
