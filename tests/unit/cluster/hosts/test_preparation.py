"""One more deployment is planned: what is refused beside those that serve."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.preparing import (
    Asleep,
    DeploymentSettings,
    HostedPlan,
    HostedPreparing,
    Surroundings,
)
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import NodeReport
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.config.model_settings import load_models
from alignedserve.config.sections import MIB
from alignedserve.core.errors import ConfigError, NotEnoughMemory
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.loaded_file import loaded_file, with_loaded, write_changes
from alignedserve.runtime.model.model_files import read_config
from tests.support.marks import each
from tests.support.models.lora_folders import write_adapter
from tests.support.models.tiny_llama import TINY_LLAMA
from tests.unit.cluster.driven_cluster import NODES, POCKET, joined

TOO_SMALL = Machine(MIB, MIB, 2, has_bfloat16=False)  # refuses what the names do not

Prepare = Callable[..., HostedPlan]


class Examined:
    """An examination that finds this machine, and the model there."""

    def __enter__(self) -> "Examined":
        return self

    def __exit__(self, *ended: object) -> None:
        pass

    def reports_that_come(self, device: str, models: Sequence[Path]) -> dict[RayNode, NodeReport]:
        return {NODES[0]: NodeReport("v", TOO_SMALL, digests=("digest",))}


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    settings = load_models(None, ["model.random_weights=true", "a.lora.adapters.terse=/terse"], ("a=/a", "b=/b"))
    serving = dict(zip(("", "2"), settings.own, strict=True))
    known = DeploymentSettings(settings, serving, tmp_path)
    joining, members = joined(tmp_path, {})
    around = Surroundings(tuple(members[:1]), joining.models, {"node-0": TOO_SMALL}, "cpu")
    examined: Any = Examined()
    preparing = HostedPreparing(known, lambda nodes: examined)
    return lambda deployment_id, order, replaced, *asleep: preparing.prepare(
        deployment_id, order, replaced, replace(around, asleep=Asleep(asleep))
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path)


def test_a_model_is_not_called_as_an_adapter_of_another(prepare: Prepare, path: str) -> None:
    with pytest.raises(ConfigError, match="the adapter terse of a is called as another model"):
        prepare("3", AddModel(path=path, name="terse"), None)
    with pytest.raises(NotEnoughMemory):
        prepare("3", AddModel(path=path, name="c"), None)


def test_a_replacement_keeps_the_names_of_the_adapters(prepare: Prepare, path: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "terse", read_config(tmp_path))
    order = ReplaceModel(name="a", path=path, settings=(f"lora.adapters.terse={tmp_path / 'terse'}",))
    with pytest.raises(NotEnoughMemory):
        prepare("3", order, "")
    with pytest.raises(ConfigError, match="the adapter terse of b is called as another"):
        prepare("3", ReplaceModel(name="b", path=path, settings=order.settings), "2")


def test_a_model_is_not_called_as_an_adapter_that_was_loaded(prepare: Prepare, path: str, tmp_path: Path) -> None:
    write_changes(loaded_file(tmp_path, "2"), with_loaded({}, LoraAdapter("taken", "/taken", b"d" * 16)))
    with pytest.raises(ConfigError, match="taken is the name of an adapter that was loaded for b"):
        prepare("3", AddModel(path=path, name="taken"), None)


@each("name", ["docs", "small", "polite"])
def test_a_name_of_a_model_that_sleeps_is_taken(prepare: Prepare, path: str, name: str) -> None:
    docs = replace(POCKET, name="docs", aliases=("small",), adapters=(LoraAdapter("polite", "/polite", b"d" * 16),))
    by_name, by_alias = AddModel(path, name), AddModel(path, "c", (f"model.aliases=[{name}]",))
    for order in (by_name, by_alias):
        with pytest.raises(ConfigError, match=f"{name} is (a name of docs, )?a model on demand"):
            prepare("3", order, None, docs)
        with pytest.raises(NotEnoughMemory):
            prepare("3", order, None)
