"""What stands in for libraries and for torch.cuda takes arguments that the real ones have, by their names."""

import ast
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support.fake_cuda import runtime

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())


OF_THE_FAKE = ["current_device(device)"]  # which its own parts ask for a device by


def argument_names(module: ast.Module, name: str) -> list[str]:
    (function,) = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def test_the_stand_in_for_flash_attn_has_the_arguments_of_the_pinned_one(tmp_path: Path) -> None:
    """Read from its source, as it cannot be imported without CUDA."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(tmp_path)]
    fetched = subprocess.run([*pip, f"flash-attn-4=={PINS['flash-attn-4']}"], capture_output=True, check=False)
    if fetched.returncode != 0:
        pytest.skip("no registry here has it")
    (wheel,) = tmp_path.glob("*.whl")
    source = ast.parse(zipfile.ZipFile(wheel).read("flash_attn/cute/interface.py"))
    stand_in = ast.parse((ROOT / "tests/gpu_kernels/library_stand_ins.py").read_text())
    installed, own = argument_names(source, "flash_attn_varlen_func"), argument_names(stand_in, "flash_4")
    assert [name for name in installed if name in own] == own


def test_the_fake_cuda_takes_no_arguments_that_torch_has_not() -> None:
    """Of functions and methods that torch.cuda has in Python; what is C++'s says nothing of its arguments."""
    unknown = []
    for name, stand_in in runtime.NAMES.items():
        real = getattr(torch.cuda, name)
        if inspect.isfunction(stand_in) and inspect.isfunction(real):
            unknown += _unknown(name, stand_in, real)
        if inspect.isclass(stand_in) and inspect.isclass(real):
            for method, own in vars(stand_in).items():
                theirs = getattr(real, method, None)
                if inspect.isfunction(own) and inspect.isfunction(theirs):
                    unknown += _unknown(f"{name}.{method}", own, theirs)
    assert unknown == OF_THE_FAKE


def _unknown(name: str, stand_in: object, real: object) -> list[str]:
    own, theirs = (inspect.signature(function).parameters for function in (stand_in, real))  # type: ignore[arg-type]
    if any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in theirs.values()):
        return []
    positional = [one for one in own.values() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    optional = [one.name for one in own.values() if one.default is not one.empty]
    too_many = [f"{name}: {len(positional)} arguments"] if len(positional) > len(theirs) else []
    return too_many + [f"{name}({one})" for one in optional if one not in theirs]
