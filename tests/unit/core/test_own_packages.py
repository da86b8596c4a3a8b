"""Another project's package `kernels`, in the place of ours or over it, is refused at the start by name."""

import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from alignedserve.core.errors import ResourceError
from alignedserve.core.own_packages import require_own_kernels

OWN = Path(kernels.__file__).parent
ROOT = OWN.parent


def install_foreign(folder: Path) -> None:
    package, metadata = folder / "kernels", folder / "kernels-0.9.0.dist-info"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("__version__ = '0.9.0'\n")
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that packages are found in before all others."""
    monkeypatch.delitem(sys.modules, "kernels")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_our_own_is_accepted() -> None:
    require_own_kernels()


def test_another_package_in_its_place_is_refused(only: Path) -> None:
    install_foreign(only)
    with pytest.raises(ResourceError, match=r"kernels that Python finds is not AlignedServe's; run pip uninstall ker"):
        require_own_kernels()


def test_another_package_over_ours_is_refused(only: Path) -> None:
    (only / "kernels").mkdir()
    (only / "kernels" / "gpu_dispatch.py").touch()
    install_foreign(only)
    with pytest.raises(ResourceError, match=r"was installed over AlignedServe's; run pip uninstall kernels"):
        require_own_kernels()


def test_another_package_behind_ours_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_foreign(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    require_own_kernels()


@pytest.mark.slow
@pytest.mark.parametrize("code", ["from alignedserve.cli.main import main; main()", "from alignedserve import LLM"])
def test_a_start_says_so_in_one_line(tmp_path: Path, code: str) -> None:
    install_foreign(tmp_path)
    lines = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; sys.argv = ['alignedserve', '--help']; {code}"
    )
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert "kernels that Python finds is not AlignedServe's" in ended.stderr.replace("\n", " ")
