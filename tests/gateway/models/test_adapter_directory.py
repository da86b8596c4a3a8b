"""Adapters that are loaded while serving: known to every process of the node, and to one that is restarted."""

from pathlib import Path

import pytest

from alignedserve.api.errors import Forbidden, NotFound
from alignedserve.api.models.model_services import AdapterDirectory
from alignedserve.config.sections import LoraConfig, ModelSectionConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.keys.entry import NAMED, KeyEntry
from alignedserve.runtime.lora.loaded_adapters import with_adapters
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.lora_folders import write_adapter
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow


def test_what_one_process_loads_and_unloads_the_others_know(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path / "model", "llama")
    for name in ("fixed", "mine"):
        write_adapter(tmp_path / "adapters" / name, reference, seed=len(name))
    config = LoraConfig(adapters={"fixed": str(tmp_path / "adapters/fixed")}, allowed_folder=str(tmp_path / "adapters"))
    served = with_adapters(resolve_model(ModelSectionConfig(path=str(tmp_path / "model"))), config)
    one, other = (AdapterDirectory(served, tmp_path / "adapters.json") for _ in range(2))
    loaded = one.load("mine", str(tmp_path / "adapters/mine"))
    assert [adapter.name for adapter in other.all] == ["fixed", "mine"]
    assert other.find("mine") == loaded
    assert AdapterDirectory(served, tmp_path / "adapters.json").find("mine") == loaded
    with pytest.raises(InvalidRequest, match="load_inplace"):
        other.load("mine", str(tmp_path / "adapters/mine"))
    for name in ("fixed", served.name):
        with pytest.raises(InvalidRequest, match="configuration"):
            one.load(name, str(tmp_path / "adapters/mine"))
    with pytest.raises(InvalidRequest, match="not inside"):
        one.load("outside", str(tmp_path))
    other.unload("mine")
    assert one.find("mine") is None
    with pytest.raises(NotFound):
        one.unload("mine")


def test_an_adapter_is_replaced_and_unloaded_by_who_loaded_it_or_who_sees_all(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path / "model", "llama")
    write_adapter(tmp_path / "adapters/mine", reference, seed=1)
    config = LoraConfig(allowed_folder=str(tmp_path / "adapters"))
    served = with_adapters(resolve_model(ModelSectionConfig(path=str(tmp_path / "model"))), config)
    directory, path = AdapterDirectory(served, tmp_path / "adapters.json"), str(tmp_path / "adapters/mine")
    first, second = (KeyEntry(name, f"{NAMED}{name}") for name in ("first", "second"))
    operator = KeyEntry("operator", f"{NAMED}operator", may_see_usage=True)
    plain = KeyEntry("plain", "digest-of-a-plain-key")
    for other in (operator, plain):
        directory.load("mine", path, key=first)
        for refused in (lambda: directory.load("mine", path, replaces=True, key=second),
                        lambda: directory.unload("mine", second)):  # fmt: skip
            with pytest.raises(Forbidden, match="Another key"):
                refused()
        assert directory.load("mine", path, replaces=True, key=first) == directory.find("mine")
        directory.unload("mine", other)
    directory.load("mine", path, key=second)  # any key may take a name that was unloaded
    directory.unload("mine", second)
