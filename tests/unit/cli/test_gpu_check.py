"""`alignedserve gpu-check` on a machine without a GPU, which it says, with what it would do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from alignedserve.cli.main import app
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.devices import cuda_obstacle
from lab.gpu_check.check import NO_GPU
from lab.gpu_check.part_list import PARTS


@pytest.mark.skipif(cuda_obstacle() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_it_would_do(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    shown = CliRunner().invoke(app, ["gpu-check", "--output", str(file)])
    assert shown.exit_code == NO_GPU
    assert shown.output.startswith("No GPU is checked here: ")
    assert all(part.what in shown.output for part in PARTS)
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_said_before_five_minutes_of_checks(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["gpu-check", "--output", str(tmp_path / "missing" / "found.json")])
    assert isinstance(shown.exception, ConfigError)
    assert "found.json: cannot be written: No such file or directory" in str(shown.exception)
