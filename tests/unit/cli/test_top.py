"""`alignedserve top`: from what a gateway answers to what is drawn."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import orjson
import pytest
from rich.console import Console
from typing_extensions import override

from alignedserve.batches.records import BatchTotals
from alignedserve.cli.commands import top as command
from alignedserve.cli.commands.top import LiveDocument, LiveReading, drawn
from alignedserve.cli.console import results
from alignedserve.cli.main import main
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError, PeerError, PeerLost, ProtocolError
from alignedserve.gateway.routes.live import live_view
from alignedserve.messages.gateways import ClusterStatus
from tests.gateway.monitoring.live_samples import BUSY_STATUS
from tests.gateway.support import saying, services_for
from tests.harnesses.scripted_backend import ScriptedBackend
from tests.support.marks import each


def document(status: ClusterStatus | None = BUSY_STATUS, time_s: float = 10.0) -> dict[str, Any]:
    """Return what a gateway answers whose router reports this."""
    services = services_for(ScriptedBackend(saying("hello"), status), GatewayConfig())
    totals = BatchTotals(completed=5, num_waiting=7, num_in_flight=2, num_batches={"in_progress": 1}, num_at_risk=1)
    return live_view(services, totals, time_s)


def read(view: dict[str, Any]) -> LiveDocument:
    return msgspec.json.decode(orjson.dumps(view), type=LiveDocument)


def text_of(reading: LiveReading, capsys: pytest.CaptureFixture[str]) -> str:
    results().print(drawn(reading))
    return capsys.readouterr().out


def later(**changes: int) -> dict[str, Any]:
    """Return the document of two seconds later."""
    worker = msgspec.structs.replace(BUSY_STATUS.workers[1], num_tokens=1000, wall_s=10.0, compute_s=3.5)
    status = msgspec.structs.replace(BUSY_STATUS, workers=(BUSY_STATUS.workers[0], worker), **changes)
    return document(status, 12.0)


def test_rates_are_those_between_two_documents(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(LiveReading(read(later(num_tokens=1100, num_prompt_tokens=5600)), read(document())), capsys)
    assert "100 tokens/s · 300 prompt tokens/s · prefix hits 75% · pool 48 of 64 blocks" in text
    assert "queue through in 1.5 s, 2 at risk" in text
    assert "prefill-0  prefill  0/0" in " ".join(text.split(" ")).replace("    ", "  ")
    (decoder,) = [line.split() for line in text.splitlines() if line.startswith("decode-0")]
    assert decoder == ["decode-0", "elastic", "6/8", "0", "40/100", "25%", "120-200", "50", "0", "75%"]
    (queued,) = [line.split() for line in text.splitlines() if line.startswith("best effort")]
    assert queued == ["best", "effort", "9", "30.0", "s", "0", "3", "2", "-"]
    assert "1 in_progress · 7 lines waiting, 2 at work, 5 done, 0 failed · 1 late" in text


def test_no_figure_is_cut_in_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(drawn(LiveReading(read(later()), read(document()))))
    text = capsys.readouterr().out
    assert "…" not in text
    (decoder,) = [line.split() for line in text.splitlines() if line.startswith("decode-0")]
    assert decoder[:7] == ["decode-0", "elastic", "6/8", "0", "40/100", "25%", "120-200"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("earlier", [None, document(msgspec.structs.replace(BUSY_STATUS, num_tokens=10**6))])
def test_no_rate_is_told_without_two_reports_of_one_router(
    earlier: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(LiveReading(read(later()), read(earlier) if earlier is not None else None), capsys)
    assert "- tokens/s" in text


def test_where_time_goes_is_drawn_once_it_went_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    gained = msgspec.structs.replace(BUSY_STATUS.iteration_log, forward_s=5.0, sampling_s=1.125)
    status = msgspec.structs.replace(BUSY_STATUS, iteration_log=gained)
    text = text_of(LiveReading(read(document(status, 12.0)), read(document())), capsys)
    assert "computing 75%  sampling 25%" in text
    assert "computing" not in text_of(LiveReading(read(document()), read(document())), capsys)


def test_a_cluster_without_router_or_without_models_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no report: its router is not connected" in text_of(LiveReading(read(document(None)), None), capsys)
    empty = {**document(), "models": [], "batches": None}
    assert "No model is served." in text_of(LiveReading(read(empty), None), capsys)


def test_names_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    worker = msgspec.structs.replace(BUSY_STATUS.workers[0], worker="\x1b[2J[red]w", node="\x1b]0;x\x07n")
    view = document(msgspec.structs.replace(BUSY_STATUS, workers=(worker,)))
    text = text_of(LiveReading(read(view), None), capsys)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]w" in text


class _Handler(BaseHTTPRequestHandler):
    answers: list[tuple[int, bytes]]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("authorization")))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[_Handler]]]:
    """A server that answers what the test puts into `answers`, the last for ever; its address."""
    monkeypatch.setattr(command, "_ONCE_S", 0.0)
    handler = type("Handler", (_Handler,), {"answers": [], "asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", handler
        http.shutdown()
        thread.join()


def test_once_looks_twice_and_prints(
    server: tuple[str, type[_Handler]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.answers += [(200, orjson.dumps(document())), (200, orjson.dumps(later(num_tokens=1100)))]
    monkeypatch.setenv("ALIGNEDSERVE_API_KEY", "a-key")
    command.top(f"{url}/v1/", is_once=True, every_s=1.0)
    assert "100 tokens/s" in capsys.readouterr().out
    assert handler.asked == [("/v1/alignedserve/live", "Bearer a-key")] * 2


@each(("problem", "code"), [(None, 0), ("no worker that decodes is registered", 1)])
@each("options", [(), ("--json",)])
def test_the_status_of_any_gateway_is_one_look(
    server: tuple[str, type[_Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: str | None,
    code: int,
    options: tuple[str, ...],
) -> None:
    url, handler = server
    handler.answers[:] = [(200, orjson.dumps(document() | {"not_ready": problem}))]
    monkeypatch.setattr("sys.argv", ["alignedserve", "status", "--url", url, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert "real-time" in capsys.readouterr().out or options


def test_without_a_terminal_it_goes_on_line_by_line_and_outlasts_a_failure(
    server: tuple[str, type[_Handler]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.answers += [(200, orjson.dumps(document())), (503, b""), (200, orjson.dumps(later(num_tokens=1100)))]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    command.top(url, is_once=False, every_s=0.5)
    first, second = capsys.readouterr().out.split("alignedserve top")[1:]
    assert "the server answers with status 503; trying again" in first
    assert "100 tokens/s" in second
    assert pauses == [0.5, 0.5]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((401, b"{}"), PeerError, "ALIGNEDSERVE_API_KEY"),
        ((403, b"{}"), PeerError, "may not see what others use: it needs may_see_usage"),
        ((404, b"{}"), PeerError, "no such page"),
        ((302, b""), PeerError, "status 302"),
        ((200, b"<html>"), ProtocolError, "does not answer as AlignedServe does"),
        ((200, b"[" * 100_000), ProtocolError, "does not answer as AlignedServe does"),
        ((200, b'{"models": 1}'), ProtocolError, "does not answer as AlignedServe does"),
    ],
)
def test_what_is_not_the_document_is_refused(
    server: tuple[str, type[_Handler]], answer: tuple[int, bytes], error: type[Exception], words: str
) -> None:
    url, handler = server
    handler.answers.append(answer)
    with pytest.raises(error, match=words):
        command.top(url, is_once=True, every_s=1.0)


@each("url", ["", "ftp://host", "http://", "host:80"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be the address of a server"):
        command.top(url, is_once=True, every_s=1.0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(PeerLost, match="nothing answers at http://127"):
        command.top("http://127.0.0.1:9", is_once=True, every_s=1.0)
