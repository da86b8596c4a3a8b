"""What `--engine vllm` refuses before it starts anything, and what its children are called with."""

from pathlib import Path

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from alignedserve.upstream.children import VllmChildren


@pytest.fixture
def command(tmp_path: Path) -> str:
    path = tmp_path / "vllm"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("models", "arguments", "text"),
    [
        ((), "", "needs a model"),
        (("m",), "--port 5", "leave out --port"),
        (("m",), "--api-key=secret", "leave out --api-key,"),
        (("m",), "'open", "a quote is open"),
    ],
)
def test_refuses_what_it_sets_itself(command: str, models: tuple[str, ...], arguments: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        VllmChildren(command, models, 1, arguments, Slo())
    assert "secret" not in str(caught.value)


def test_refuses_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine must be vllm"):
        VllmChildren(str(tmp_path / "vllm"), ("m",), 1, "", Slo())


def test_children_of_each_model_have_our_scheduler_and_the_default_objectives(command: str) -> None:
    children = VllmChildren(command, ("a=folder/m", "folder/n"), 2, "--dtype float32", Slo(0.5))
    called = list(children._commands.values())
    assert len(set(children.urls)) == 4
    assert [words[words.index("--served-model-name") + 1] for words in called] == ["a", "a", "n", "n"]
    assert all('{"alignedserve": {"slo_ttft_ms": 500.0}}' in words for words in called)
    assert all(words[-2:] == ["--dtype", "float32"] for words in called)
