"""Environments of the clients, apart from the server's own: made once, and again when their lists change."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv-clients"
_INSTALL_TIMEOUT_S = 900.0
_INSTALLER = "uv==0.13.9"  # pip takes minutes for as many packages
_UNREACHABLE = ("Failed to establish", "name resolution", "Failed to fetch", "dns error", "ENOTFOUND", "EAI_AGAIN")


def python_environment() -> Path:
    """Return the folder of the Python clients' executables."""
    folder, listed = FOLDER / "python", HERE / "requirements.txt"
    if not _is_made(folder, listed):
        _install(folder, listed)
        _lend_torch(folder)
        _note_made(folder, listed)
    return folder / "bin"


def openai_package(version: str) -> Path:
    """Return a folder of this version of OpenAI's SDK alone, whose dependencies the Python clients' environment has."""
    folder, executables = FOLDER / f"openai-{version}", python_environment()
    if not folder.exists():
        install = (executables / "uv", "pip", "install", "--quiet", "--python", executables / "python")
        _run(*install, "--no-deps", "--target", folder, f"openai=={version}")
    return folder


def open_webui_environment() -> Path:
    """Return the folder of Open WebUI's executable: 900 MB, without the torch that only its documents and audio use."""
    folder, listed = FOLDER / "open-webui", HERE / "open_webui.txt"
    if not _is_made(folder, listed):
        _install(folder, listed)
        _note_made(folder, listed)
    return folder / "bin"


def node_environment() -> Path:
    """Return the folder with the Node clients in its `node_modules`."""
    folder, listed = FOLDER / "node", HERE / "package-lock.json"
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    if not _is_made(folder, listed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in (HERE / "package.json", listed):
            shutil.copy(path, folder)
        _run("npm", "ci", "--no-audit", "--no-fund", cwd=folder)
        _note_made(folder, listed)
    return folder


def _install(folder: Path, listed: Path) -> None:
    """Make an environment of just these packages."""
    _run(sys.executable, "-m", "venv", "--clear", folder)
    python = folder / "bin/python"
    _run(python, "-m", "pip", "install", "--quiet", _INSTALLER)
    _run(folder / "bin/uv", "pip", "install", "--quiet", "--python", python, "--no-deps", "-r", listed)


def _lend_torch(folder: Path) -> None:
    """Let lm-eval import the server's torch, which is gigabytes; the clients' own packages come first."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None, "the server needs torch"
    assert torch.origin is not None, "torch is a package"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "server.pth").write_text(f"{Path(torch.origin).parents[1]}\n", encoding="utf-8")


def _is_made(folder: Path, listed: Path) -> bool:
    stamp = folder / "made-of"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == _digest(listed)


def _note_made(folder: Path, listed: Path) -> None:
    (folder / "made-of").write_text(_digest(listed), encoding="utf-8")


def _digest(listed: Path) -> str:
    return hashlib.sha256(listed.read_bytes()).hexdigest()


def _run(*words: str | Path, cwd: Path | None = None) -> None:
    """Run one step; without a way to the registry the test is skipped, any other failure is one of the test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=_INSTALL_TIMEOUT_S
    )
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip(f"the registry cannot be reached: {' '.join(map(str, words[:4]))}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
