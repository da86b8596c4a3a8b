"""Runs tests as where the native kernels were not built: python -m tests.without_native [pytest arguments].

Moving the built file away is not enough: an editable installation of another working tree may bring its own.
"""

import sys

import pytest

if __name__ == "__main__":
    sys.modules["kernels._native"] = None  # type: ignore[assignment]  # importing it raises ImportError from now on
    from kernels.cpu.native import supported_levels

    assert not supported_levels(), "the native kernels are still found"
    sys.exit(pytest.main(sys.argv[1:]))
