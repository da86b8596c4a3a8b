"""How the views of gateways and batch worker are combined."""

from alignedserve.cluster.deployments.driver import combined
from alignedserve.cluster.deployments.logic import View
from alignedserve.runtime.model.served_model import DeploymentState

NOT_UP = "a gateway or the batch worker is not up"


def test_all_must_have_had_a_token() -> None:
    ready, unready = DeploymentState("2", None, 3), DeploymentState("2", "no token yet", 1)
    assert combined(["2"], [(ready,), (ready,)]) == {"2": View(None, 6)}
    assert combined(["2"], [(ready,), (unready,)]) == {"2": View("no token yet", 4)}
    assert combined(["2"], [(ready,), ()]) == {"2": View(NOT_UP, 3)}
    assert combined(["2"], []) == {"2": View(NOT_UP, 0)}


def test_one_that_is_lost_holds_up_no_order_for_ever_and_ends_no_deployment() -> None:
    idle = DeploymentState("", None, 0)
    assert combined([""], [(idle,), None]) == {"": View(NOT_UP, 1)}


def test_what_waiting_does_not_mend_is_named_first() -> None:
    unready = DeploymentState("2", "no token yet", 1)
    hopeless = DeploymentState("2", "its tokenizer cannot be loaded", 0, is_hopeless=True)
    view = View("its tokenizer cannot be loaded", 1, is_hopeless=True)
    assert combined(["2"], [(unready,), (hopeless,), ()]) == {"2": view}
