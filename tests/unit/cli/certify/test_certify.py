"""`alignedserve certify` against small real servers, right and wrong ones."""

import asyncio
import base64
import io
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web
from PIL import Image
from typing_extensions import override

from alignedserve.cli.main import main
from alignedserve.client.openai_client import CompletionApi
from alignedserve.core.errors import ConfigError, PeerError
from lab.certification.certificate import Certificate, certificate_of
from lab.certification.page import certificate_page
from lab.certification.protocol import Phase
from lab.certification.verdict import Bounds
from lab.commands.certify.command import bounds_of, wanted_of
from lab.commands.certify.live import LiveOptions, LiveRun, Measured
from lab.commands.certify.options import CertifyOptions
from tests.support.servers.fake_batches import FakeBatches
from tests.support.servers.fake_server import FakeServer, Script

_SIZES: dict[str, Any] = {
    "burst_s": 0.2,
    "idle_s": 0.0,
    "num_bursts": 1,
    "rate": 60.0,
    "num_lines": 12,
    "chat_output_len": 4,
    "document_output_len": 6,
    # No server here is slow: a busy machine is.
    "ttft_s": 20.0,
    "tpot_s": 20.0,
}


async def _measured(
    url: str, patience_s: float = 20.0, say: Callable[[str], None] = lambda words: None, **sizes: Any
) -> Measured:
    options = LiveOptions(
        url=url, api_key=None, model=None, api=CompletionApi.CHAT, outstanding=4, streams=False,
        patience_s=patience_s, stage_s=0.02, settles_s=0.0, lost_patience_s=0.3,
    )  # fmt: skip
    wanted = wanted_of(CertifyOptions(url=url, **{**_SIZES, **sizes}))
    return await LiveRun(options, wanted, say).run()


def _certificate(measured: Measured) -> Certificate:
    return certificate_of(
        title="Certificate", about=(), protocol=measured.protocol, speed=measured.speed, evidence=measured.evidence,
        bounds=Bounds(min_documents_share=0.0, min_beside=0.0),
    )  # fmt: skip


def _missed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.missed]


async def test_a_server_with_batches_is_certified() -> None:
    server = FakeBatches()
    async with server.serving() as url:
        measured = await _measured(url)
    certificate = _certificate(measured)
    assert _missed(certificate) == []
    assert measured.evidence.notes == ()
    assert measured.documents == "batches of /v1/batches"
    assert server.windows_asked == ["60s"] * 6
    assert "Held: all" in certificate_page(certificate)


async def test_lines_that_go_wrong_are_seen() -> None:
    async with FakeBatches(loses=3, doubles=4, garbles=True).serving() as url:
        assert _missed(_certificate(await _measured(url))) == ["lines lost", "lines doubled", "lines wrong"]


async def test_a_server_that_takes_one_window_only_gets_that_one() -> None:
    server = FakeBatches(windows=("24h",))
    async with server.serving() as url:
        measured = await _measured(url)
    assert _missed(_certificate(measured)) == []
    assert "24h" in server.windows_asked
    (note,) = measured.evidence.notes
    assert "refuses a window of 60s (completion_window must be 24h): it was asked for 24h" in note


@pytest.mark.parametrize(
    "make", [lambda: FakeBatches(takes_batches=False).serving(), lambda: _without_batches()], ids=["refused", "none"]
)
async def test_without_batches_documents_are_streams(make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    async with make() as server:
        measured = await _measured(server if isinstance(server, str) else server.url)
    assert not [name for name in _missed(_certificate(measured)) if "lines" in name]
    assert measured.documents == "streams, 4 at a time, with service_tier: flex and priority: 10"
    assert any("documents were streamed instead" in note for note in measured.evidence.notes)
    beside = measured.evidence.phase(Phase.BESIDE)
    assert beside is not None
    assert len(beside.documents) == 36


def _without_batches(refused: tuple[str, ...] = ()) -> FakeServer:
    def respond(body: dict[str, Any]) -> Script:
        if any(field in body for field in refused):
            return Script(status=400)
        return Script(pieces=("yes ",) * int(body["max_tokens"]))

    return FakeServer(respond)


async def test_what_a_server_refuses_is_not_sent() -> None:
    async with _without_batches(("priority", "ignore_eos")) as server:
        measured = await _measured(server.url)
    assert measured.documents == "streams, 4 at a time, with service_tier: flex"
    assert any("refuses ignore_eos" in note for note in measured.evidence.notes)
    tiers = [body.get("service_tier") for body in server.requests if body["max_tokens"] > 4]
    assert set(tiers) == {None, "flex"}


async def test_a_server_that_dies_leaves_a_part() -> None:
    server = FakeBatches(dies_with_first_batch=True)
    async with server.serving() as url:
        measured = await _measured(url, rate=200.0)
    phases = measured.evidence.phases
    assert [phase.phase for phase in phases] == [Phase.CHAT_ALONE, Phase.BESIDE]
    assert phases[1].failure is not None
    assert "nothing answers" in phases[1].failure
    page = certificate_page(_certificate(measured))
    assert "ended early" in page
    assert "Not held" in page


class _Silent(FakeBatches):
    """Says nothing from the first phase on."""

    is_silent = False

    def hear(self, words: str) -> None:
        self.is_silent |= words.startswith("phase 1")

    @override
    async def _stream(self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        if self.is_silent:
            await asyncio.Event().wait()
        await super()._stream(request, response, body)


async def test_a_server_that_falls_silent_is_given_up() -> None:
    server = _Silent()
    async with server.serving() as url:
        measured = await _measured(url, patience_s=1.0, say=server.hear)
    assert [phase.failure for phase in measured.evidence.phases] == ["no chat went on for 1 s (--patience)"]


async def test_batches_that_do_not_get_on_are_given_up_and_cancelled() -> None:
    server = FakeBatches(lasts_s=1000.0, num_failed=2)
    async with server.serving() as url:
        measured = await _measured(url, patience_s=1.0)
    last = measured.evidence.phases[-1]
    assert last.failure == "no document came to its end for 1 s (--patience)"
    assert [one.num_answered for one in last.batches] == [0, 0, 0]  # what has failed is no answer
    assert "lines failed" in _missed(_certificate(measured))
    assert server.cancelled == ["batch-0", "batch-1", "batch-2"]


async def test_a_server_without_models_or_answers_is_named() -> None:
    async with FakeServer(models=()) as server:
        with pytest.raises(PeerError, match="lists no model"):
            await _measured(server.url)
    async with FakeServer(lambda body: Script(status=503)) as server:
        with pytest.raises(PeerError, match="does not answer a chat: http 503, scripted refusal"):
            await _measured(server.url)
    with pytest.raises(PeerError, match=r"nothing answers at http://127\.0\.0\.1:9;"):
        await _measured("http://127.0.0.1:9")


def test_options_that_contradict_each_other() -> None:
    for fields in (
        {"url": "http://x", "is_simulated": True},
        {"url": "x"},
        {"url": "http://x", "topology": "elastic"},
        {"topology": "round"},
        {"endpoint": "responses"},
        {"url": "http://x", "key_variable": "A_VARIABLE_THAT_NOBODY_HAS_SET"},
        {"endpoint": "completions", "chat_pictures": 1.0},
        {"is_simulated": True, "document_pictures": 1.0},
    ):
        with pytest.raises(ConfigError):
            CertifyOptions(**fields)
    for fields, message in (
        (
            {"is_simulated": True, "streams": True, "key_variable": "K"},
            "--key-from and --streams: no meaning with --sim",
        ),
        (
            {"is_simulated": True, "endpoint": "completions", "outstanding": 9, "patience_s": 9.0},
            "--patience: no meaning",
        ),
        ({"url": "http://x", "hardware": "h100"}, "--hardware: no meaning without --simulated"),
        ({"simulated_model": "opt-13b", "costs": "calibrated"}, "--simulated-model and --costs: no meaning without"),
        ({"is_simulated": True, "model": "opt-13b", "simulated_model": "opt-6.7b"}, "leave one out"),
    ):
        with pytest.raises(ConfigError, match=message):
            CertifyOptions(**fields)
    with pytest.raises(ConfigError, match="--window 3y"):
        wanted_of(CertifyOptions(windows=("3y",)))


def test_a_seed_below_zero_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["alignedserve", "certify", "--simulated", "--seed", "-1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "'--seed'" in capsys.readouterr().err


def test_bounds_are_those_of_the_options() -> None:
    assert bounds_of(CertifyOptions()) == Bounds()
    assert bounds_of(CertifyOptions(min_documents=50.0)).min_documents_share == 0.5


async def test_pictures_go_with_the_shares_that_were_asked_for_and_are_told_apart() -> None:
    seen: list[bytes] = []

    def respond(body: dict[str, Any]) -> Script:
        content = body["messages"][0]["content"]
        if not isinstance(content, str):
            seen.append(base64.b64decode(content[0]["image_url"]["url"].partition("base64,")[2]))
        is_document = body["max_tokens"] > _SIZES["chat_output_len"]
        # Documents last: chats with none beside them are not counted.
        return Script(pieces=("yes ",) * int(body["max_tokens"]), gap_s=0.004 if is_document else 0.0)

    async with FakeServer(respond) as server:
        measured = await _measured(server.url, chat_pictures=50.0, document_pictures=25.0, picture_edge=32)
    sizes = [Image.open(io.BytesIO(file)).size for file in seen]
    assert set(sizes) == {(32, 32)}
    beside = measured.evidence.phase(Phase.BESIDE)
    assert beside is not None
    assert sum(chat.has_picture for chat in beside.chats) == len(beside.chats) // 2
    page = certificate_page(_certificate(measured))
    assert "50% of chats and 25% of documents carry one of 32 x 32 pixels, each its own: 30 a second" in page
    assert "with a picture, chat beside documents" in page
    assert "chats carried a picture of 32 x 32 pixels, 30.0 a second in bursts: 100.0% were in time" in page
    lines = [line.request for batch in measured.protocol.batches(Phase.BESIDE) for line in batch.lines]
    assert sum(line.picture_edge is not None for line in lines) >= 6


async def test_a_server_that_takes_no_pictures_is_named_at_once() -> None:
    def respond(body: dict[str, Any]) -> Script:
        return Script() if isinstance(body["messages"][0]["content"], str) else Script(status=400)

    async with FakeServer(respond) as server:
        with pytest.raises(PeerError, match="does not answer a chat with a picture: http 400, scripted refusal"):
            await _measured(server.url, document_pictures=1.0)
