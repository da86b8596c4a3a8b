"""One more deployment is planned: what is refused beside those that serve."""

import json
from pathlib import Path

import pytest

from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.preparation import DeploymentSettings, Preparing
from alignedserve.cluster.gpu_claims import GpuClaims
from alignedserve.cluster.memory_planner import Machine
from alignedserve.config.model_settings import load_models
from alignedserve.config.sections import MIB
from alignedserve.core.errors import ConfigError, NotEnoughMemory
from alignedserve.core.request import LoraAdapter
from alignedserve.process.addresses import AddressBook
from alignedserve.runtime.lora.loaded_file import loaded_file, with_loaded, write_changes
from alignedserve.runtime.model.model_files import read_config
from tests.support.in_process import TINY_LLAMA
from tests.support.lora_folders import write_adapter

TOO_SMALL = Machine(MIB, MIB, 2, has_bfloat16=False)  # refuses what the names do not


@pytest.fixture
def preparing(tmp_path: Path) -> Preparing:
    settings = load_models(None, ["model.random_weights=true", "a.lora.adapters.terse=/terse"], ("a=/a", "b=/b"))
    serving = dict(zip(("", "2"), settings.own, strict=True))
    known = DeploymentSettings(settings, serving, tmp_path)
    return Preparing(known, (TOO_SMALL, GpuClaims()), AddressBook(tmp_path), (None, None))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path)


def test_a_model_is_not_called_as_an_adapter_of_another(preparing: Preparing, path: str) -> None:
    with pytest.raises(ConfigError, match="the adapter terse of a is called as another model"):
        preparing.prepare("3", AddModel(path=path, name="terse"), None, ())
    with pytest.raises(NotEnoughMemory):
        preparing.prepare("3", AddModel(path=path, name="c"), None, ())


def test_a_replacement_keeps_the_names_of_the_adapters(preparing: Preparing, path: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "terse", read_config(tmp_path))
    order = ReplaceModel(name="a", path=path, settings=(f"lora.adapters.terse={tmp_path / 'terse'}",))
    with pytest.raises(NotEnoughMemory):
        preparing.prepare("3", order, "", ())
    with pytest.raises(ConfigError, match="the adapter terse of b is called as another"):
        preparing.prepare("3", ReplaceModel(name="b", path=path, settings=order.settings), "2", ())


def test_a_model_is_not_called_as_an_adapter_that_was_loaded(preparing: Preparing, path: str, tmp_path: Path) -> None:
    write_changes(loaded_file(tmp_path, "2"), with_loaded({}, LoraAdapter("taken", "/taken", b"d" * 16)))
    with pytest.raises(ConfigError, match="taken is the name of an adapter that was loaded for b"):
        preparing.prepare("3", AddModel(path=path, name="taken"), None, ())
