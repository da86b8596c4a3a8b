"""How deployments of a running cluster come and go: exact commands."""

import pytest

from alignedserve.cluster.deployments.logic import (
    PROVING_S,
    DeploymentsLogic,
    DeploymentStage,
    Failed,
    ModelAct,
    ModelStep,
    Prepared,
    SeenModels,
    View,
)
from alignedserve.cluster.deployments.orders import AddModel, ModelOrder, RemoveModel, ReplaceModel
from alignedserve.config.model_settings import MAX_MODELS

ADD, REPLACE, REMOVE = AddModel("/b", "b"), ReplaceModel("a", "/new"), RemoveModel("b")
READY, UNREADY = View(None, 0), View("no token yet", 0)


def prepare(deployment_id: str, order: AddModel | ReplaceModel, replaced: str | None) -> ModelStep:
    return ModelStep(ModelAct.PREPARE, deployment_id, order=order, replaced=replaced)


def start(deployment_id: str) -> ModelStep:
    return ModelStep(ModelAct.START, deployment_id)


def end(deployment_id: str) -> ModelStep:
    return ModelStep(ModelAct.END, deployment_id)


def discard(deployment_id: str) -> ModelStep:
    return ModelStep(ModelAct.DISCARD, deployment_id)


def done(order_id: str, text: str) -> ModelStep:
    return ModelStep(ModelAct.DONE, order_id, text)


def refuse(order_id: str, text: str) -> ModelStep:
    return ModelStep(ModelAct.REFUSE, order_id, text)


ANNOUNCE, SETTLE = ModelStep(ModelAct.ANNOUNCE), ModelStep(ModelAct.SETTLE, "2", replaced="")


class Driver:
    """Tells a logic what is seen, and keeps what it says apart from what is to be done."""

    def __init__(self, *names: str) -> None:
        self.logic = DeploymentsLogic.of_start(
            {"" if number == 1 else str(number): name for number, name in enumerate(names, 1)}
        )
        self.now = 0.0

    def look(self, seen: SeenModels) -> list[ModelStep]:
        return [step for step in self.logic.reconcile(seen, self.now) if step.act is not ModelAct.SAY]

    def order(self, order: ModelOrder, order_id: str = "o") -> list[ModelStep]:
        return [step for step in self.logic.order(order_id, order, self.now) if step.act is not ModelAct.SAY]

    def prepared(self, deployment_id: str, name: str) -> list[ModelStep]:
        return self.look(SeenModels(prepared={deployment_id: Prepared(name)}))

    def up(self, deployment_id: str) -> list[ModelStep]:
        return self.look(SeenModels(up=[deployment_id]))

    def failed(self, deployment_id: str, problem: str) -> list[ModelStep]:
        return self.look(SeenModels(failed={deployment_id: Failed(problem)}))

    def viewed(self, views: dict[str, View]) -> list[ModelStep]:
        return self.look(SeenModels(views=views))

    def gone(self, deployment_id: str) -> list[ModelStep]:
        return self.look(SeenModels(gone=[deployment_id]))

    def phases(self) -> dict[str, DeploymentStage]:
        return {row.deployment_id: row.phase for row in self.logic.rows}

    def proving(self, order: ModelOrder, name: str) -> None:
        """Bring a new deployment, the second, to the wait for its first token."""
        self.order(order)
        self.prepared("2", name)
        self.up("2")


@pytest.fixture
def driver() -> Driver:
    return Driver("a")


def test_a_model_is_added(driver: Driver) -> None:
    assert driver.order(ADD) == [prepare("2", ADD, None)]
    assert driver.prepared("2", "b") == [start("2")]
    assert driver.up("2") == [ANNOUNCE]
    assert driver.viewed({"": READY, "2": UNREADY}) == []
    assert driver.viewed({"": READY, "2": READY}) == [ANNOUNCE, done("o", "b is served")]
    assert driver.phases() == {"": DeploymentStage.SERVING, "2": DeploymentStage.SERVING}


def test_a_model_is_replaced_and_the_old_one_ends_with_its_last_request(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    assert driver.phases() == {"": DeploymentStage.SERVING, "2": DeploymentStage.PROVING}
    assert driver.viewed({"": View(None, 3), "2": READY}) == [
        SETTLE,
        ANNOUNCE,  # the switch, in one list
    ]
    assert driver.phases() == {"2": DeploymentStage.SERVING, "": DeploymentStage.DRAINING}  # in the old one's place
    assert driver.viewed({"": View(None, 1), "2": View(None, 2)}) == []
    assert driver.viewed({"": View(None, 0), "2": View(None, 2)}) == [ANNOUNCE, end("")]
    assert driver.gone("") == [done("o", "the old a has ended")]
    assert driver.phases() == {"2": DeploymentStage.SERVING}


def test_a_view_from_before_the_switch_does_not_end_the_old_one(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    assert driver.viewed({"": READY, "2": READY}) == [SETTLE, ANNOUNCE]
    assert driver.phases()[""] is DeploymentStage.DRAINING


def test_a_replacement_that_does_not_come_up_leaves_the_old_one_untouched(driver: Driver) -> None:
    driver.order(REPLACE)
    refused = driver.failed("2", "no such folder")
    assert refused == [refuse("o", "no such folder"), discard("2")]
    assert driver.phases() == {"": DeploymentStage.SERVING}
    driver.order(REPLACE)
    driver.prepared("3", "a")
    failed = driver.failed("3", "out of memory")
    assert failed == [refuse("o", "out of memory"), end("3")]
    assert driver.gone("3") == []
    assert driver.phases() == {"": DeploymentStage.SERVING}


def test_a_replacement_without_a_token_is_given_up_in_time(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    driver.now = PROVING_S - 1.0
    assert driver.viewed({"": READY, "2": UNREADY}) == []
    driver.now = PROVING_S
    problem = f"no token has come through it for {PROVING_S:.0f} s: no token yet"
    expected = [refuse("o", problem), ANNOUNCE, end("2")]
    assert driver.viewed({"": READY, "2": UNREADY}) == expected
    assert driver.phases()[""] is DeploymentStage.SERVING


def test_a_model_that_cannot_answer_is_given_up_at_once(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    nan = View("the canary token failed: the model gave no usable logits", 0, is_hopeless=True)
    problem = f"no token can come through it: {nan.missing}"
    expected = [refuse("o", problem), ANNOUNCE, end("2")]
    assert driver.viewed({"": READY, "2": nan}) == expected
    assert driver.phases()[""] is DeploymentStage.SERVING


def test_a_model_is_removed_when_its_requests_have_ended() -> None:
    driver = Driver("a", "b")
    assert driver.order(REMOVE) == [ANNOUNCE]
    assert driver.viewed({"": READY, "2": View(None, 1)}) == []
    assert driver.viewed({"": READY, "2": READY}) == [ANNOUNCE, end("2")]
    assert driver.gone("2") == [done("o", "b is removed")]


def test_requests_of_an_old_model_may_be_given_a_time() -> None:
    driver = Driver("a", "b")
    driver.order(RemoveModel("b", drains_within_s=5.0))
    driver.now = 4.0
    assert driver.viewed({"2": View(None, 1)}) == []
    driver.now = 5.0
    assert driver.viewed({"2": View(None, 1)}) == [ANNOUNCE, end("2")]


def test_orders_are_carried_out_one_after_the_other(driver: Driver) -> None:
    driver.order(ADD, "first")
    assert driver.order(REPLACE, "second") == []
    driver.prepared("2", "b")
    driver.up("2")
    served = driver.viewed({"2": READY})
    assert served == [ANNOUNCE, done("first", "b is served"), prepare("3", REPLACE, "")]


def test_a_draining_model_holds_up_no_order() -> None:
    driver = Driver("a", "b")
    driver.order(REMOVE, "first")
    assert driver.order(ADD, "second") == [prepare("3", ADD, None)]


def test_an_order_that_fails_lets_the_next_begin(driver: Driver) -> None:
    driver.order(ADD, "first")
    driver.order(ADD, "second")
    refused = driver.failed("2", "no")
    assert refused == [refuse("first", "no"), discard("2"), prepare("3", ADD, None)]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (AddModel("/x", "a"), "a model is served as a already; replace it, or give another name"),
        (ReplaceModel("c", "/x"), "no model is served as c; there are a"),
        (RemoveModel("c"), "no model is served as c; there are a"),
        (RemoveModel("a"), "a is the only model; stop the cluster instead"),
    ],
)
def test_orders_that_cannot_be_are_refused(driver: Driver, order: ModelOrder, says: str) -> None:
    assert driver.order(order) == [refuse("o", says)]


def test_a_cluster_serves_so_many_models_at_most() -> None:
    driver = Driver(*(f"m{number}" for number in range(MAX_MODELS)))
    assert driver.order(ADD) == [refuse("o", f"a cluster serves {MAX_MODELS} models at most")]


def test_a_name_that_follows_from_the_folder_may_be_taken_too(driver: Driver) -> None:
    driver.order(AddModel("/elsewhere/a"))
    refusal, discarded = driver.prepared("2", "a")
    assert refusal.act is ModelAct.REFUSE
    assert discarded == discard("2")  # or its memory would be counted for ever
    assert driver.phases() == {"": DeploymentStage.SERVING}


def test_a_replacement_keeps_the_name(driver: Driver) -> None:
    driver.order(REPLACE)
    refusal, discarded = driver.prepared("2", "z")
    assert refusal.act is ModelAct.REFUSE
    assert discarded == discard("2")
    assert driver.phases() == {"": DeploymentStage.SERVING}


def test_ids_are_never_used_again(driver: Driver) -> None:
    driver.order(ADD)
    driver.failed("2", "no")
    assert driver.order(ADD) == [prepare("3", ADD, None)]


def test_the_giver_hears_what_a_replacement_leaves_out(driver: Driver) -> None:
    driver.order(REPLACE)
    prepared = {"2": Prepared("a", ("the adapter x is not carried over",))}
    steps = driver.logic.reconcile(SeenModels(prepared=prepared), 0.0)
    assert steps[0] == ModelStep(ModelAct.SAY, "o", "the adapter x is not carried over")
