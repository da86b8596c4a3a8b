"""How a model is named that joins a running cluster."""

import pytest

from alignedserve.cli.models.serving import adding
from alignedserve.core.errors import ConfigError


def test_a_model_is_added_as_serve_takes_it() -> None:
    assert (adding("pocket", None, ()).path, adding("pocket", None, ()).name) == ("pocket", None)
    assert adding("pocket", "drafts", ()).name == "drafts"
    order = adding("drafts=pocket", None, ("decode.count=2",))
    assert (order.path, order.name, order.settings) == ("pocket", "drafts", ("decode.count=2",))
    with pytest.raises(ConfigError, match="drafts=pocket and --name both name the model"):
        adding("drafts=pocket", "other", ())
