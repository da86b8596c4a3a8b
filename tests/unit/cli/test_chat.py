import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console
from rich.table import Table

from alignedserve.cli.commands.chat import ChatConversation, ChatSampling, ChatSession
from alignedserve.cli.commands.chat import chat as run_chat
from alignedserve.cli.commands.serving.serve import describe_objectives, show_trial
from alignedserve.cli.options import ChatCommandOptions
from alignedserve.client.openai_client import ListedModel
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.messages.cluster_view import WorkerSpeed
from alignedserve.messages.gateways import ClusterStatus
from tests.gateway.deployment_support import served_model
from tests.support.servers.fake_server import FakeServer, Script, running

# A terminal's Ctrl-C is never ignored, as it is for whatever a shell has started in the background.
CHAT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from alignedserve.cli.main import main
main()
"""
SLOW = Script(pieces=tuple(f"piece{count} " for count in range(200)), gap_s=0.05)


class Terminal:
    """The chat in a pseudo-terminal, as a person has it."""

    def __init__(self, url: str) -> None:
        controller, terminal = pty.openpty()
        self._fd = controller
        self.shown = ""
        arguments = [sys.executable, "-c", CHAT, "chat", "--url", url]
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "120"}
        self.process = subprocess.Popen(
            arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
        )
        os.close(terminal)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until_left(self) -> int:
        """As a person would: readline does not see a signal that comes just after it has shown its prompt. Once it was
        seen, which a new line shows, another would hit Python in the middle of its end: it comes only while Python
        sleeps in its read, not while it waits for a core with the signal in hand."""
        own = psutil.Process(self.process.pid)
        for _ in range(20):
            self.interrupt()
            while not (has_ended := self._ends_line_within(0.5)) and own.status() != psutil.STATUS_SLEEPING:
                pass
            if has_ended:
                break
        return self.close()

    def _ends_line_within(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while "\n" not in self.shown:
            if not select.select([self._fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
                return False
            try:
                self.shown += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:  # it has left
                return True
        return True

    def wait_for(self, text: str) -> None:
        """Wait until `text` was shown since the last call."""
        end_s = time.monotonic() + 60.0
        while text not in self.shown:
            assert time.monotonic() < end_s, f"{text!r} never came; shown: {self.shown!r}"
            self.shown += os.read(self._fd, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def close(self) -> int:
        code = self.process.wait(60)
        os.close(self._fd)
        return code


def test_ctrl_c_stops_the_answer_and_then_leaves() -> None:
    def respond(body: dict[str, Any]) -> Script:
        return SLOW if len(body["messages"]) == 1 else Script()

    with running(FakeServer(respond=respond)) as server:
        terminal = Terminal(server.url)
        terminal.wait_for("> ")
        terminal.type("tell me\n")
        terminal.wait_for("piece2")
        terminal.interrupt()
        terminal.wait_for("(stopped)")
        terminal.wait_for("> ")
        terminal.type("and now\n")
        terminal.wait_for("Hello there.")
        terminal.wait_for("> ")
        assert terminal.interrupt_until_left() == 0
    first, stopped, second = server.requests[1]["messages"]
    assert (first["content"], second["content"]) == ("tell me", "and now")
    assert stopped["role"] == "assistant"
    assert stopped["content"].startswith("piece0 piece1 piece2")
    assert "piece199" not in stopped["content"]


def _typed(monkeypatch: pytest.MonkeyPatch, server: FakeServer, *lines: str) -> int:
    waiting = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read_line)
    return ChatSession(options=ChatCommandOptions(server.url), model=ListedModel("m", 400)).converse()


def test_conversation_is_kept_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeServer()) as server:
        assert (
            _typed(monkeypatch, server, "one", "two", "/new", "three", "/system be brief", "four", "/quit", "five") == 0
        )
    asked = [
        [message["role"][0] + ":" + message["content"] for message in body["messages"]] for body in server.requests
    ]
    assert asked == [["u:one"], ["u:one", "a:Hello there.", "u:two"], ["u:three"], ["s:be brief", "u:four"]]


def test_error_event_is_shown_and_the_text_before_it_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(respond=lambda body: Script(error_after=1))) as server:
        assert _typed(monkeypatch, server, "one", "two") == 0
    assert "the answer broke off: scripted failure" in capsys.readouterr().err
    assert [message["content"] for message in server.requests[1]["messages"]] == ["one", "Hello", "two"]


def test_question_without_any_answer_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeServer(respond=lambda body: Script(status=503))) as server:
        _typed(monkeypatch, server, "one", "two")
    assert [len(body["messages"]) for body in server.requests] == [1, 1]


def test_unknown_command_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        _typed(monkeypatch, server, "/nonsense", "/help", "")
    shown = capsys.readouterr().err
    assert "There is no command /nonsense" in shown
    assert "/system TEXT" in shown
    assert server.requests == []


def test_the_model_is_chosen_on_the_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(models=("m", "other"))) as server:
        _typed(monkeypatch, server, "one", "/model", "/model nobody", "/model other", "two")
    shown = capsys.readouterr().err
    assert "* m\n  other\n" in shown
    assert "no model nobody; it serves m, other" in shown
    assert "Now talking to other." in shown
    assert [body["model"] for body in server.requests] == ["m", "other"]
    assert len(server.requests[1]["messages"]) == 3  # the conversation goes on


def test_cut_answer_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=lambda body: Script(finish_reason="length"))) as server:
        _typed(monkeypatch, server, "one")
    assert "length limit" in capsys.readouterr().err


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        assert run_chat(ChatCommandOptions(server.url, once="hi", system="be brief")) == 0
    assert capsys.readouterr().out == "Hello there.\n"
    assert [message["content"] for message in server.requests[0]["messages"]] == ["be brief", "hi"]


def test_once_fails_with_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=lambda body: Script(cut_after=1))) as server:
        assert run_chat(ChatCommandOptions(server.url, once="hi")) == 1
    assert "disconnected" in capsys.readouterr().err


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_API_KEY", "a-key")
    with running(FakeServer()) as server:
        run_chat(ChatCommandOptions(server.url, once="hi"))
    assert server.headers[0]["authorization"] == "Bearer a-key"


def test_prompt_on_stdin() -> None:
    with running(FakeServer()) as server:
        command = [sys.executable, "-c", "from alignedserve.cli.main import main; main()", "chat", "--url", server.url]
        ended = subprocess.run(command, input="from a pipe\n", capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("Hello there.\n", "", 0)
    assert server.requests[0]["messages"][0]["content"] == "from a pipe"


def test_lines_of_a_pipe_are_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n/set temperature 0\ntwo\n/new\nthree\n"))
        assert run_chat(ChatCommandOptions(server.url)) == 0
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
        assert run_chat(ChatCommandOptions(server.url, once="-")) == 0
    assert capsys.readouterr().out == "Hello there.\n" * 4
    asked = [[message["content"] for message in body["messages"]] for body in server.requests]
    assert asked == [["one"], ["one", "Hello there.", "two"], ["three"], ["a\nb"]]
    assert [body["temperature"] for body in server.requests[:3]] == [0.2, 0, 0]


def test_a_turn_of_a_pipe_that_fails_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeServer(respond=lambda body: Script(status=503))) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        assert run_chat(ChatCommandOptions(server.url)) == 1
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
        with pytest.raises(ConfigError, match="no prompt"):
            run_chat(ChatCommandOptions(server.url))
    assert len(server.requests) == 1


def test_sampling_is_the_models_until_it_is_changed() -> None:
    model = ListedModel("m", 400, {"temperature": 0.6, "top_k": 20.0}, "its makers")
    sampling = ChatSampling()
    assert sampling.fields(model) == {}
    assert sampling.in_words(model) == "temperature 0.6, top_k 20 (its makers)"
    sampling.change("top_k 5")
    sampling.change("min_p 0.1")
    assert sampling.fields(model) == {"top_k": 5, "min_p": 0.1}
    assert sampling.in_words(model) == "temperature 0.6, top_k 5, min_p 0.1 (its makers; changed here)"
    sampling.change("top_k default")
    assert sampling.fields(model) == {"min_p": 0.1}
    for wrong in ("heat 1", "top_p 7", "top_k x", "temperature nan", "temperature"):
        with pytest.raises(ConfigError):
            sampling.change(wrong)


def test_a_model_without_makers_values_gets_this_programs() -> None:
    assert ChatSampling().fields(ListedModel("m", 400)) == {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    assert ChatSampling().fields(ListedModel("m")) == {"temperature": 0.2, "top_p": 0.9}  # of a plain server
    assert ChatSampling(0.0).fields(ListedModel("m", 400)) == {"temperature": 0.0}


def test_answer_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=lambda body: Script(pieces=("a\x1b[2Jb\n",)))) as server:
        run_chat(ChatCommandOptions(server.url, once="hi"))
    assert capsys.readouterr().out == "a[2Jb\n"


THINKING = Script(thoughts=("so ", "it [b]is"))


def test_thoughts_stand_apart_from_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(respond=lambda body: THINKING)) as server:
        _typed(monkeypatch, server, "one", "two")
    shown = capsys.readouterr()
    assert shown.out == "Hello there.\nHello there.\n\n"
    assert shown.err.count("so it [b]is\n\n") == 2
    assert [message["content"] for message in server.requests[1]["messages"]] == ["one", "Hello there.", "two"]


def test_scripts_get_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=lambda body: THINKING)) as server:
        run_chat(ChatCommandOptions(server.url, once="hi"))
    assert capsys.readouterr() == ("Hello there.\n", "")


def test_the_effort_is_asked_for_and_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer()) as server:
        run_chat(ChatCommandOptions(server.url, once="hi", reasoning_effort="low"))
        _typed(monkeypatch, server, "one", "/think high", "two", "/think much", "three", "/think default", "four")
    assert [body.get("reasoning_effort") for body in server.requests] == ["low", None, "high", "high", None]
    assert "/think takes one of none" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code", "is_other_key"), [(401, "", True), (403, "model_not_allowed", False)])
def test_another_key_is_asked_for_where_this_one_is_not_known(
    capsys: pytest.CaptureFixture[str], status: int, code: str, is_other_key: bool
) -> None:
    with running(FakeServer(respond=lambda body: Script(status=status, error_code=code))) as server:
        assert run_chat(ChatCommandOptions(url=server.url, once="hi")) == 1
    shown = capsys.readouterr().err
    assert "scripted refusal" in shown
    assert ("set ALIGNEDSERVE_API_KEY" in shown) is is_other_key


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reasoning-effort: must be one of none"):
        run_chat(ChatCommandOptions("http://127.0.0.1:1", once="hi", reasoning_effort="much"))


def test_settling_without_text_takes_the_question_back() -> None:
    conversation = ChatConversation(system="s")
    conversation.ask("one")
    conversation.settle("")
    assert conversation.messages() == [{"role": "system", "content": "s"}]


TOO_LONG = Script(status=400, error_code="context_length_exceeded")


def test_a_conversation_that_outgrows_the_context_loses_its_beginning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(respond=lambda body: TOO_LONG if len(body["messages"]) > 3 else Script())) as server:
        _typed(monkeypatch, server, "one", "two", "three", "four")
    told = capsys.readouterr().err
    assert told.count("its oldest part is forgotten") == 2
    assert "error" not in told
    answered = [body["messages"] for body in server.requests if len(body["messages"]) <= 3]
    assert [messages[0]["content"] for messages in answered] == ["one", "one", "two", "three"]
    assert [messages[-1]["content"] for messages in answered] == ["one", "two", "three", "four"]


def test_one_message_that_is_too_long_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(respond=lambda body: TOO_LONG)) as server:
        _typed(monkeypatch, server, "one")
    assert "scripted refusal" in capsys.readouterr().err
    assert [body.get("max_tokens") for body in server.requests] == [100, None]


def test_sampling_keeps_small_models_from_repeating_themselves() -> None:
    with running(FakeServer()) as server:
        run_chat(ChatCommandOptions(server.url, once="hi", model="m"))
        ChatSession(options=ChatCommandOptions(server.url), model=ListedModel("m", 99)).answer_once("hi")
        ChatSession(options=ChatCommandOptions(server.url, temperature=0.0), model=ListedModel("m", 99)).answer_once(
            "hi"
        )
    names = ("temperature", "top_p", "repetition_penalty", "max_tokens")
    asked = [[body.get(name) for name in names] for body in server.requests]
    assert asked == [[0.2, 0.9, None, None], [0.2, 0.9, 1.1, 24], [0.0, None, None, 24]]


STATUS = ClusterStatus(speed=WorkerSpeed(short_prompt_s=0.2, prompt_s=1.5, token_s=0.1, shared_token_s=0.12))


def shown(config: GatewayConfig, **statuses: ClusterStatus) -> str:
    table, console = Table.grid(padding=(0, 2)), Console(width=200, record=True, file=None, quiet=False)
    describe_objectives(table, config, statuses)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_objectives_of_chat_are_shown() -> None:
    text = shown(GatewayConfig(), tiny=STATUS)
    assert "Objectives  first token within 4.5 s, then a token every 0.24 s (4.2/s)  (of chat that names none)" in text
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
    assert "first: first token within 4.5 s" in text
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
