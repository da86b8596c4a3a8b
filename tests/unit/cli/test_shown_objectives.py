"""What the screen of a started server says of objectives, and of a first request."""

import json
import shlex

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from alignedserve.cli.commands.serving.serve import describe_objectives, show_trial
from alignedserve.config.sections import GatewayConfig
from alignedserve.messages.cluster_view import WorkerSpeed
from alignedserve.messages.gateways import ClusterStatus
from tests.gateway.deployment_support import served_model

STATUS = ClusterStatus(speed=WorkerSpeed(short_prompt_s=0.2, prompt_s=2.5, token_s=0.1, shared_token_s=0.12))


def shown(config: GatewayConfig, **statuses: ClusterStatus) -> str:
    table, console = Table.grid(padding=(0, 2)), Console(width=200, record=True, file=None, quiet=False)
    describe_objectives(table, config, statuses)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_objectives_of_chat_are_shown() -> None:
    text = shown(GatewayConfig(), tiny=STATUS)
    assert "Objectives  first token within 7.5 s, then a token every 0.24 s (4.2/s)  (of chat that names none)" in text
    assert "warning" not in text
    assert "Objectives  none" in shown(GatewayConfig(default_ttft_s="none", default_tpot_s="none"), tiny=STATUS)


def test_those_that_nobody_can_hold_are_warned_of() -> None:
    text = shown(GatewayConfig(default_ttft_s=0.1), tiny=STATUS)
    assert (
        "warning     gateway.default_ttft_s=0.1 cannot be held: even a prompt of 64 tokens alone takes 0.20 s" in text
    )


def test_each_of_several_models_has_its_own() -> None:
    other = msgspec.structs.replace(STATUS, speed=WorkerSpeed(prompt_s=0.1))
    text = shown(GatewayConfig(), first=STATUS, second=other)
    assert "first: first token within 7.5 s" in text
    assert "second: first token within 1 s " in text


def test_the_first_request_can_be_copied_from_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("alignedserve.cli.commands.serving.serve.results", lambda: Console(width=60))
    show_trial("http://127.0.0.1:8000", served_model("tiny"), GatewayConfig(keys_file="keys.yaml"))
    (line,) = capsys.readouterr().out.splitlines()
    _, curl, url, *options = shlex.split(line)
    assert (curl, url) == ("curl", "http://127.0.0.1:8000/v1/chat/completions")
    assert "Authorization: Bearer $ALIGNEDSERVE_API_KEY" in options
    assert json.loads(options[-1])["model"] == "tiny"
