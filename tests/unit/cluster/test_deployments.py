"""How deployments of a running cluster come and go: exact commands."""

import pytest

from alignedserve.cluster.deployments.logic import (
    PROVING_S,
    AnnounceDeployments,
    Conclude,
    DeploymentsLogic,
    DeploymentStage,
    Discard,
    EndProcesses,
    Failed,
    Ordered,
    Prepare,
    Prepared,
    ProcessesGone,
    ProcessesUp,
    Say,
    SettleAdapters,
    StartProcesses,
    View,
    Viewed,
)
from alignedserve.cluster.deployments.orders import AddModel, ModelOrder, RemoveModel, ReplaceModel
from alignedserve.config.model_settings import MAX_MODELS

ADD, REPLACE, REMOVE = AddModel("/b", "b"), ReplaceModel("a", "/new"), RemoveModel("b")
READY, UNREADY = View(None, 0), View("no token yet", 0)


class Driver:
    """Feeds a logic, and keeps what it says apart from what is to be done."""

    def __init__(self, *names: str) -> None:
        self.logic = DeploymentsLogic.of_start(
            {"" if number == 1 else str(number): name for number, name in enumerate(names, 1)}
        )
        self.now = 0.0

    def on(self, event: object) -> list[object]:
        commands = self.logic.on_event(event, self.now)  # type: ignore[arg-type]
        return [one for one in commands if not isinstance(one, Say)]

    def order(self, order: ModelOrder, order_id: str = "o") -> list[object]:
        return self.on(Ordered(order_id, order))

    def phases(self) -> dict[str, DeploymentStage]:
        return {one.deployment_id: one.phase for one in self.logic.standings}

    def proving(self, order: ModelOrder, name: str) -> None:
        """Bring a new deployment, the second, to the wait for its first token."""
        self.order(order)
        self.on(Prepared("2", name))
        self.on(ProcessesUp("2"))


@pytest.fixture
def driver() -> Driver:
    return Driver("a")


def test_a_model_is_added(driver: Driver) -> None:
    assert driver.order(ADD) == [Prepare("2", ADD, None)]
    assert driver.on(Prepared("2", "b")) == [StartProcesses("2")]
    assert driver.on(ProcessesUp("2")) == [AnnounceDeployments()]
    assert driver.on(Viewed({"": READY, "2": UNREADY})) == []
    assert driver.on(Viewed({"": READY, "2": READY})) == [AnnounceDeployments(), Conclude("o", "b is served")]
    assert driver.phases() == {"": DeploymentStage.SERVING, "2": DeploymentStage.SERVING}


def test_a_model_is_replaced_and_the_old_one_ends_with_its_last_request(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    assert driver.phases() == {"": DeploymentStage.SERVING, "2": DeploymentStage.PROVING}
    assert driver.on(Viewed({"": View(None, 3), "2": READY})) == [
        SettleAdapters("o", "", "2"),
        AnnounceDeployments(),  # the switch, in one list
    ]
    assert driver.phases() == {"2": DeploymentStage.SERVING, "": DeploymentStage.DRAINING}  # in the old one's place
    assert driver.on(Viewed({"": View(None, 1), "2": View(None, 2)})) == []
    assert driver.on(Viewed({"": View(None, 0), "2": View(None, 2)})) == [AnnounceDeployments(), EndProcesses("")]
    assert driver.on(ProcessesGone("")) == [Conclude("o", "the old a has ended")]
    assert driver.phases() == {"2": DeploymentStage.SERVING}


def test_a_view_from_before_the_switch_does_not_end_the_old_one(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    assert driver.on(Viewed({"": READY, "2": READY})) == [SettleAdapters("o", "", "2"), AnnounceDeployments()]
    assert driver.phases()[""] is DeploymentStage.DRAINING


def test_a_replacement_that_does_not_come_up_leaves_the_old_one_untouched(driver: Driver) -> None:
    driver.order(REPLACE)
    refused = driver.on(Failed("2", "no such folder"))
    assert refused == [Conclude("o", "no such folder", is_refused=True), Discard("2")]
    assert driver.phases() == {"": DeploymentStage.SERVING}
    driver.order(REPLACE)
    driver.on(Prepared("3", "a"))
    failed = driver.on(Failed("3", "out of memory"))
    assert failed == [Conclude("o", "out of memory", is_refused=True), EndProcesses("3")]
    assert driver.on(ProcessesGone("3")) == []
    assert driver.phases() == {"": DeploymentStage.SERVING}


def test_a_replacement_without_a_token_is_given_up_in_time(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    driver.now = PROVING_S - 1.0
    assert driver.on(Viewed({"": READY, "2": UNREADY})) == []
    driver.now = PROVING_S
    problem = f"no token has come through it for {PROVING_S:.0f} s: no token yet"
    expected = [Conclude("o", problem, is_refused=True), AnnounceDeployments(), EndProcesses("2")]
    assert driver.on(Viewed({"": READY, "2": UNREADY})) == expected
    assert driver.phases()[""] is DeploymentStage.SERVING


def test_a_model_that_cannot_answer_is_given_up_at_once(driver: Driver) -> None:
    driver.proving(REPLACE, "a")
    nan = View("the canary token failed: the model gave no usable logits", 0, is_hopeless=True)
    problem = f"no token can come through it: {nan.missing}"
    expected = [Conclude("o", problem, is_refused=True), AnnounceDeployments(), EndProcesses("2")]
    assert driver.on(Viewed({"": READY, "2": nan})) == expected
    assert driver.phases()[""] is DeploymentStage.SERVING


def test_a_model_is_removed_when_its_requests_have_ended() -> None:
    driver = Driver("a", "b")
    assert driver.order(REMOVE) == [AnnounceDeployments()]
    assert driver.on(Viewed({"": READY, "2": View(None, 1)})) == []
    assert driver.on(Viewed({"": READY, "2": READY})) == [AnnounceDeployments(), EndProcesses("2")]
    assert driver.on(ProcessesGone("2")) == [Conclude("o", "b is removed")]


def test_requests_of_an_old_model_may_be_given_a_time() -> None:
    driver = Driver("a", "b")
    driver.order(RemoveModel("b", drains_within_s=5.0))
    driver.now = 4.0
    assert driver.on(Viewed({"2": View(None, 1)})) == []
    driver.now = 5.0
    assert driver.on(Viewed({"2": View(None, 1)})) == [AnnounceDeployments(), EndProcesses("2")]


def test_orders_are_carried_out_one_after_the_other(driver: Driver) -> None:
    driver.order(ADD, "first")
    assert driver.order(REPLACE, "second") == []
    driver.on(Prepared("2", "b"))
    driver.on(ProcessesUp("2"))
    served = driver.on(Viewed({"2": READY}))
    assert served == [AnnounceDeployments(), Conclude("first", "b is served"), Prepare("3", REPLACE, "")]


def test_a_draining_model_holds_up_no_order() -> None:
    driver = Driver("a", "b")
    driver.order(REMOVE, "first")
    assert driver.order(ADD, "second") == [Prepare("3", ADD, None)]


def test_an_order_that_fails_lets_the_next_begin(driver: Driver) -> None:
    driver.order(ADD, "first")
    driver.order(ADD, "second")
    refused = driver.on(Failed("2", "no"))
    assert refused == [Conclude("first", "no", is_refused=True), Discard("2"), Prepare("3", ADD, None)]


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
    assert driver.order(order) == [Conclude("o", says, is_refused=True)]


def test_a_cluster_serves_so_many_models_at_most() -> None:
    driver = Driver(*(f"m{number}" for number in range(MAX_MODELS)))
    assert driver.order(ADD) == [Conclude("o", f"a cluster serves {MAX_MODELS} models at most", is_refused=True)]


def test_a_name_that_follows_from_the_folder_may_be_taken_too(driver: Driver) -> None:
    driver.order(AddModel("/elsewhere/a"))
    refusal, discard = driver.on(Prepared("2", "a"))
    assert isinstance(refusal, Conclude)
    assert refusal.is_refused
    assert discard == Discard("2")  # or its memory would be counted for ever
    assert driver.phases() == {"": DeploymentStage.SERVING}


def test_a_replacement_keeps_the_name(driver: Driver) -> None:
    driver.order(REPLACE)
    refusal, discard = driver.on(Prepared("2", "z"))
    assert isinstance(refusal, Conclude)
    assert refusal.is_refused
    assert discard == Discard("2")
    assert driver.phases() == {"": DeploymentStage.SERVING}


def test_ids_are_never_used_again(driver: Driver) -> None:
    driver.order(ADD)
    driver.on(Failed("2", "no"))
    assert driver.order(ADD) == [Prepare("3", ADD, None)]


def test_the_giver_hears_what_a_replacement_leaves_out(driver: Driver) -> None:
    driver.order(REPLACE)
    commands = driver.logic.on_event(Prepared("2", "a", ("the adapter x is not carried over",)), 0.0)
    assert commands[0] == Say("o", "the adapter x is not carried over")
