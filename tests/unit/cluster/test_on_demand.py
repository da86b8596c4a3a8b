"""Which models are loaded on demand, which leave, which wait: exact commands."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from alignedserve.cluster.deployments.driver import DeploymentsDriver
from alignedserve.cluster.deployments.logic import Deployment, DeploymentsLogic
from alignedserve.cluster.deployments.on_demand import (
    DOCUMENTS_TURN_S,
    RETRY_S,
    TURN_S,
    LoadModel,
    ModelDemand,
    ModelOnDemand,
    ModelUse,
    OnDemandLogic,
    OnDemandModels,
    UnloadModel,
)
from alignedserve.cluster.deployments.orders import AddModel
from alignedserve.cluster.deployments.preparing import Asleep
from alignedserve.config.model_settings import load_models
from alignedserve.config.sections import PrefixCacheConfig
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.model.served_model import DeploymentPhase, ServedDeployment
from tests.unit.cluster.driven_cluster import POCKET, joined

CHAT, DOCUMENTS = ModelDemand(real_time_s=1.0), ModelDemand(documents_s=1.0)
IDLE, BUSY = ModelUse(idle_s=5.0), ModelUse(num_open=1)
RUNS_DOCUMENTS = ModelUse(num_open=2, num_documents=2)


class Memory:
    """Asks a logic about models that are awake, each with a keep_alive of a minute unless another is given."""

    def __init__(self, **uses: ModelUse) -> None:
        self.logic = OnDemandLogic()
        self.now = 0.0
        self.look(uses)

    def look(
        self,
        uses: dict[str, ModelUse],
        demands: dict[str, ModelDemand] | None = None,
        *,
        keep_s: float = 60.0,
        changing: bool = False,
    ) -> list[LoadModel | UnloadModel]:
        awake = {name: (use, keep_s) for name, use in uses.items()}
        return list(self.logic.look(awake, demands or {}, self.now, is_changing=changing))

    def full(self, name: str) -> None:
        self.logic.on_refused(name, "no room", self.now, is_full=True)


def test_a_model_is_loaded_for_who_waits_longest_and_chat_goes_first() -> None:
    demands = {"a": ModelDemand(documents_s=90.0), "b": ModelDemand(real_time_s=1.0), "c": ModelDemand(real_time_s=2.0)}
    assert Memory().look({}, demands) == [LoadModel("c")]
    assert Memory().look({}, {"a": demands["a"], "b": demands["b"]}) == [LoadModel("b")]
    assert Memory().look({}, demands, changing=True) == []


def test_it_leaves_after_its_keep_alive() -> None:
    memory = Memory(a=IDLE)
    assert memory.look({"a": ModelUse(idle_s=59.0)}) == []
    assert memory.look({"a": ModelUse(idle_s=60.0)}) == [UnloadModel("a")]
    assert memory.look({"a": ModelUse(idle_s=1e9)}, keep_s=math.inf) == []
    assert memory.look({"a": ModelUse(idle_s=1.0, keep_alive_s=0.5)}) == [UnloadModel("a")]  # its last request said so
    for used in (ModelUse(num_open=1, idle_s=99.0), ModelUse(is_promised=True, idle_s=99.0)):
        assert memory.look({"a": used}) == []


def test_the_one_used_least_recently_makes_room() -> None:
    uses = {"a": ModelUse(idle_s=5.0), "b": ModelUse(idle_s=9.0), "c": BUSY}
    memory = Memory(**uses)
    assert memory.look(uses, {"d": CHAT}) == [LoadModel("d")]
    memory.full("d")
    assert memory.look(uses, {"d": CHAT}) == [UnloadModel("b")]
    assert memory.look({"a": uses["a"], "c": BUSY}, {"d": CHAT}) == [LoadModel("d")]  # tried again once it has left


def test_chat_has_the_room_of_documents_at_once_and_of_chat_after_a_turn() -> None:
    for use, first_s in ((RUNS_DOCUMENTS, 0.0), (ModelUse(is_promised=True), 0.0), (BUSY, TURN_S)):
        memory = Memory(a=use)
        memory.full("b")
        if first_s:
            memory.now = first_s - 1.0
            assert memory.look({"a": use}, {"b": ModelDemand(real_time_s=memory.now)}) == []
        memory.now = first_s
        assert memory.look({"a": use}, {"b": ModelDemand(real_time_s=memory.now)}) == [UnloadModel("a")]


def test_documents_wait_longer_for_the_room_of_chat() -> None:
    for use, turn_s in ((RUNS_DOCUMENTS, TURN_S), (BUSY, DOCUMENTS_TURN_S)):
        memory = Memory(a=use)
        memory.full("b")
        memory.now = turn_s - 1.0
        assert memory.look({"a": use}, {"b": ModelDemand(documents_s=memory.now)}) == []
        memory.now = turn_s
        assert memory.look({"a": use}, {"b": ModelDemand(documents_s=memory.now)}) == [UnloadModel("a")]


def test_a_turn_begins_when_a_model_is_awake() -> None:
    memory = Memory()
    memory.now = 100.0
    memory.look({"a": BUSY})
    memory.full("b")
    assert memory.look({"a": BUSY}, {"b": ModelDemand(real_time_s=99.0)}) == []


def test_one_that_fits_is_loaded_beside_one_that_waits_for_room() -> None:
    memory = Memory(a=BUSY)
    memory.full("large")
    assert memory.look({"a": BUSY}, {"large": CHAT, "small": DOCUMENTS}) == [LoadModel("small")]


def test_one_that_never_fits_says_why_and_is_tried_again() -> None:
    memory = Memory()
    memory.full("a")
    assert memory.logic.problem("a", memory.now) == "no room"
    assert memory.look({}, {"a": CHAT}) == []
    memory.now = RETRY_S
    assert memory.logic.problem("a", memory.now) is None
    assert memory.look({}, {"a": CHAT}) == [LoadModel("a")]
    memory.logic.on_refused("a", "its file is damaged", memory.now, is_full=False)
    assert memory.logic.problem("a", memory.now) == "its file is damaged"


def test_a_model_that_falls_asleep_keeps_the_adapters_that_were_loaded() -> None:
    order, loaded = AddModel("/docs", "docs"), LoraAdapter("new", "/new", b"d" * 16)
    deployed = ServedDeployment(replace(POCKET, name="docs"), 16, PrefixCacheConfig(), phase=DeploymentPhase.SLEEPING)
    models, others = OnDemandModels([ModelOnDemand(order, deployed, 60.0)]), AddModel("/other")
    assert models.beside(order, {}) == Asleep()  # it was never awake
    models.note_left("docs", "2", (loaded,))
    (asleep,) = models.sleeping({})
    assert asleep.served.adapters == (loaded,)
    assert models.beside(order, {}) == Asleep(former="2")  # which it has them from
    assert models.beside(others, {}) == Asleep((asleep.served,))
    assert models.beside(others, {"docs": "3"}) == Asleep()
    models.forget("docs")
    assert models.beside(others, {}) == Asleep()


def test_a_model_that_falls_asleep_and_wakes_keeps_its_place_among_the_others() -> None:
    def deployed(name: str, phase: DeploymentPhase = DeploymentPhase.SERVING) -> ServedDeployment:
        return ServedDeployment(replace(POCKET, name=name), 16, PrefixCacheConfig(), phase=phase)

    def serving(**names: str) -> DeploymentsLogic:
        return DeploymentsLogic([Deployment(one, name) for one, name in names.items()], len(names))

    names = {"d1": "first", "d2": "second", "d3": "first", "d4": "third"}
    site: Any = SimpleNamespace(
        listeners=list, announced=lambda one, phase, is_failing: deployed(names[one], phase), described=lambda _: None
    )
    asleep = ModelOnDemand(AddModel("/first", "first"), deployed("first", DeploymentPhase.SLEEPING), 60.0)
    driver = DeploymentsDriver(site, serving(d1="first", d2="second"), lambda *_: None, OnDemandModels([asleep]))
    for now in (driver.logic, serving(d2="second"), serving(d2="second", d4="third", d3="first")):
        driver.logic = now
        driver.announce()
        assert [one.served.name for one in driver.announced][:2] == ["first", "second"]
        assert [one.name for one in driver.reports()][:2] == ["first", "second"]
    assert [one.name for one in driver.reports()] == ["first", "second", "third"]


def test_a_model_wakes_with_the_settings_that_it_fell_asleep_with(tmp_path: Path) -> None:
    own = {"model": {"keep_alive": "10m", "aliases": ["🦊"], "sampling": {"min_p": 0.00001}}}
    plan = joined(tmp_path, {"model": {"keep_alive": "10m"}})[0].plan
    config = next(iter(plan.choices.values())).config
    order = ModelOnDemand.of(plan, config, own).order
    again = load_models(None, (), ()).another(order.path, order.name, order.settings)
    assert {name: again["model"][name] for name in own["model"]} == own["model"]
