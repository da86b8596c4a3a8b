"""Pictures that clients name by URLs: fetched from listed hosts alone, within limits, and never from private ones."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from alignedserve.api.errors import Overloaded, ResourceUnavailable
from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.picture_reader import PictureReader
from alignedserve.api.work_lanes import WorkLanes, note_class, note_client
from alignedserve.batch_worker.lines import ClusterLineRunner
from alignedserve.batches.interfaces import LineFailed, LineRequest
from alignedserve.batches.records import Endpoint
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass
from alignedserve.gateway.long_bodies.messages import NotRead
from alignedserve.gateway.long_bodies.process import BodyReading, ReadingModel
from alignedserve.keys.entry import ANYONE
from plugins.vision.picture_fetcher import PictureFetcher, is_public
from tests.gateway.pictures.test_pictures import GOOD, chat, data_url, image, seeing, text
from tests.gateway.support import Gateway, error_of, gateway
from tests.support.marks import each
from tests.support.servers.picture_server import PictureServer, picture_server

__all__ = ["seeing"]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PictureServer]:
    async with picture_server(tmp_path) as running:
        running.put("/otter.png?signed=%2Fa%2Bb", GOOD)
        running.put("/otter.png", GOOD)
        yield running


def fetching(served: Gateway, server: PictureServer, *addresses: str) -> None:
    """Let the gateway trust the server, and connect to this host; `addresses`: of all names."""

    async def look_up(host: str, port: int) -> Sequence[str]:
        return addresses or ("127.0.0.1",)

    own = served.services.pictures.plugin
    own.fetcher = PictureFetcher(look_up=look_up, may_connect=lambda one: one == "127.0.0.1", trust=server.trust)


async def test_every_api_and_a_batch_take_the_same_picture(seeing: ModelCard, server: PictureServer) -> None:
    url = server.url("/otter.png?signed=%2Fa%2Bb#part")
    async with gateway(model=seeing, picture_hosts=(f"localhost:{server.port}",)) as served:
        fetching(served, server)
        assert (await chat(served, text("hello "), image(data_url()))).status_code == 200
        expected = served.backend.submitted[-1]
        messages = [{"role": "user", "content": [text("hello "), image(url)]}]
        anthropic = {"type": "image", "source": {"type": "url", "url": url}}
        items = [{"type": "input_text", "text": "hello "}, {"type": "input_image", "image_url": url}]
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [text("hello "), anthropic]}]}),
            ("/v1/responses", {"store": False, "input": [{"role": "user", "content": items}]}),
        ]
        for path, body in bodies:
            answer = await served.client.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 200, answer.text
            request = served.backend.submitted[-1]
            assert (request.prompt_token_ids, request.pictures) == (expected.prompt_token_ids, expected.pictures)
        line = LineRequest(Endpoint.CHAT, "line", {"model": "tiny", "messages": messages}, ANYONE.owner)
        assert (await ClusterLineRunner(served.services).run(line)).status_code == 200
        assert served.backend.submitted[-1].pictures == expected.pictures
    assert server.asked == ["/otter.png?signed=%2Fa%2Bb"] * 4


async def test_nothing_is_fetched_unless_a_host_is_listed(seeing: ModelCard, server: PictureServer) -> None:
    port = server.port
    cases = [
        (server.url("/otter.png"), (), "not fetched from the network"),
        (server.url("/otter.png"), ("localhost", f"other.example:{port}", f"*.localhost:{port}"), "not one"),
        (f"http://localhost:{port}/otter.png", (f"localhost:{port}",), "https alone"),
        (f"https://secret@localhost:{port}/", (f"localhost:{port}",), "https alone"),
        (f"https://127.0.0.1:{port}/otter.png", (f"localhost:{port}",), "not one"),
        (f"https://localhost:{port}\\@other.example/", (f"localhost:{port}",), "https alone"),
        (f"https://localhost:{port}/secret\r\nX: y", (f"localhost:{port}",), "https alone"),
        (f"https://[::1]:{port}/secret", (f"localhost:{port}",), "https alone"),
        (f"https://secret..localhost:{port}/", (f"*.localhost:{port}",), "a name that none can have"),
        (f"https://{'secret' * 11}.localhost:{port}/", (f"*.localhost:{port}",), "a name that none can have"),
    ]
    for url, hosts, problem in cases:
        async with gateway(model=seeing, picture_hosts=hosts) as served:
            fetching(served, server)
            error = error_of(await chat(served, image(url)), 400)
            assert (error["param"], error["code"]) == ("messages[0].content[0].image_url.url", "invalid_image_url")
            assert problem in error["message"]
            assert "secret" not in error["message"]
            assert "localhost" not in error["message"]
    assert server.asked == []


async def test_bad_answers_are_refused_by_name(seeing: ModelCard, server: PictureServer) -> None:
    server.put("/secret", b"secret" * 9)
    server.put("/large", GOOD + bytes(2000))
    server.put("/gone", b"secret", "404 Not Found")
    server.put("/often", b"secret", "429 Too Many Requests")
    server.put("/gzip", GOOD, "200 OK", "Content-Encoding: gzip")
    server.put("/moved", b"", "302 Found", "Location: /otter.png")
    server.put("/round", b"", "302 Found", "Location: round")
    server.put("/other", b"", "302 Found", f"Location: https://other.example:{server.port}/otter.png")
    server.put("/plain", b"", "302 Found", f"Location: http://localhost:{server.port}/otter.png")
    server.put("/broken", b"secret", "503 Unavailable")
    server.answers["/unsized"] = b"HTTP/1.1 200 OK\r\n\r\n" + GOOD + bytes(2000)
    server.answers["/nonsense"] = b"secret\r\n\r\n"
    cases = [
        ("/secret", 400, "not a picture"),
        ("/large", 400, "at most 2048 bytes"),
        ("/unsized", 400, "at most 2048 bytes"),
        ("/gone", 400, "answers 404"),
        ("/gzip", 400, "compresses"),
        ("/round", 400, "more than 2 times"),
        ("/other", 400, "redirects to another"),
        ("/plain", 400, "redirects to another"),
        ("/broken", 502, "answers 503"),
        ("/often", 502, "answers 429"),
        ("/nonsense", 502, "cannot be reached"),
    ]
    limits: dict[str, Any] = {"max_picture_bytes": 2048, "max_picture_redirects": 2}
    hosts = (f"localhost:{server.port}", f"*.example:{server.port}")
    async with gateway(model=seeing, picture_hosts=hosts, **limits) as served:
        fetching(served, server)
        assert (await chat(served, image(server.url("/moved")))).status_code == 200
        for path, status, problem in cases:
            error = error_of(await chat(served, image(server.url(path))), status)
            assert problem in error["message"]
            assert "messages[0].content[0]" in error["message"]
            assert "secret" not in error["message"]
        untrusted = f"https://other.example:{server.port}/"
        assert "certificate" in error_of(await chat(served, image(untrusted)), 400)["message"]


async def test_a_line_ends_at_once_where_another_try_would_find_the_same(
    seeing: ModelCard, server: PictureServer
) -> None:
    server.put("/gone", b"secret", "404 Not Found")
    problems = [socket.gaierror(socket.EAI_NONAME, "secret"), socket.gaierror(socket.EAI_AGAIN, "secret")]

    async def look_up(host: str, port: int) -> Sequence[str]:
        raise problems.pop(0)

    async with gateway(model=seeing, picture_hosts=(f"localhost:{server.port}",)) as served:
        runner = ClusterLineRunner(served.services)

        def line(path: str) -> LineRequest:
            body = {"model": "tiny", "messages": [{"role": "user", "content": [image(server.url(path))]}]}
            return LineRequest(Endpoint.CHAT, "line", body, ANYONE.owner)

        fetching(served, server)
        assert (await runner.run(line("/gone"))).status_code == 400
        served.services.pictures.plugin.fetcher = PictureFetcher(look_up=look_up, trust=server.trust)
        unknown = await runner.run(line("/otter.png"))
        assert unknown.status_code == 400
        error = orjson.loads(unknown.body)["error"]
        assert error["code"] == "image_not_fetched"
        assert "not found" in error["message"]
        with pytest.raises(LineFailed):  # the resolver may answer later
            await runner.run(line("/otter.png"))


async def test_a_host_that_is_silent_is_told_of_and_a_line_tried_again(
    seeing: ModelCard, server: PictureServer
) -> None:
    hosts = (f"localhost:{server.port}",)
    async with gateway(model=seeing, picture_hosts=hosts, picture_fetch_timeout_s=0.3) as served:
        fetching(served, server)
        error = error_of(await chat(served, image(server.url("/silent"))), 502)
        assert "within 0.3 s" in error["message"]
        assert "messages[0].content[0]" in error["message"]
        line = {"model": "tiny", "messages": [{"role": "user", "content": [image(server.url("/silent"))]}]}
        request = LineRequest(Endpoint.CHAT, "line", line, ANYONE.owner)
        with pytest.raises(LineFailed):
            await ClusterLineRunner(served.services).run(request)


async def test_addresses_that_are_not_public_are_never_connected_to(seeing: ModelCard, server: PictureServer) -> None:
    async with gateway(model=seeing, picture_hosts=(f"localhost:{server.port}",)) as served:
        fetching(served, server, "127.0.0.1", "10.0.0.1")
        assert "not a public one" in error_of(await chat(served, image(server.url("/otter.png"))), 400)["message"]
        served.services.pictures.plugin.fetcher = PictureFetcher(trust=server.trust)  # with the system's own resolver
        assert "not a public one" in error_of(await chat(served, image(server.url("/otter.png"))), 400)["message"]
    assert server.asked == []
    private = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"]
    private += [
        "224.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "ff02::1",
    ]
    private += ["192.0.0.192", "::ffff:192.0.0.192", "192.88.99.1", "fec0::2", "3fff::1"]
    assert [address for address in private if is_public(address)] == []
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))


def fetcher_of(server: PictureServer) -> PictureFetcher:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return ("127.0.0.1",)

    return PictureFetcher(look_up=look_up, may_connect=lambda _: True, trust=server.trust)


async def test_fetches_at_once_are_bounded(server: PictureServer) -> None:
    config, fetcher = GatewayConfig(picture_hosts=(f"localhost:{server.port}",)), fetcher_of(server)
    impatient = replace(config, picture_fetch_timeout_s=0.2)
    silent = (fetcher.fetch(server.url("/silent"), "url", impatient) for _ in range(70))
    failed = await asyncio.gather(*silent, return_exceptions=True)
    assert [type(error).__name__ for error in failed].count("Overloaded") == 70 - 64
    assert len(server.asked) < 40  # of the others some begin as the first ones give up
    assert await fetcher.fetch(server.url("/otter.png"), "url", config) == GOOD


async def test_documents_leave_fetches_for_chats(server: PictureServer) -> None:
    config, fetcher = GatewayConfig(picture_hosts=(f"localhost:{server.port}",)), fetcher_of(server)

    async def fetch_last() -> bytes:
        note_class(RequestClass.BEST_EFFORT)
        return await fetcher.fetch(server.url("/silent"), "url", config)

    documents = [asyncio.create_task(fetch_last()) for _ in range(48)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceUnavailable):
        await asyncio.create_task(fetch_last())
    chats = [fetcher.fetch(server.url("/otter.png"), "url", config) for _ in range(64)]
    assert await asyncio.gather(*chats) == [GOOD] * 64
    assert server.asked.count("/silent") <= 12
    for one in documents:
        one.cancel()
    await asyncio.gather(*documents, return_exceptions=True)


async def test_a_client_leaves_fetches_for_others(server: PictureServer) -> None:
    config, fetcher = GatewayConfig(picture_hosts=(f"localhost:{server.port}",)), fetcher_of(server)

    async def fetch(path: str, client: str) -> bytes:
        note_client(client)
        return await fetcher.fetch(server.url(path), "url", config)

    waiting = [asyncio.create_task(fetch("/silent", "many")) for _ in range(48)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await asyncio.create_task(fetch("/silent", "many"))
    assert await asyncio.create_task(fetch("/otter.png", "one")) == GOOD
    note_class(RequestClass.BEST_EFFORT)
    assert await asyncio.create_task(fetch("/otter.png", "many")) == GOOD  # the other class has places of its own
    assert server.asked.count("/silent") <= 12
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (fetcher._num_open, fetcher._clients) == (0, {})


@each("host", ["127.0.0.1", "https://images.example", "images.example/", "*", "a.*.example", "10.1", "Images.example"])
def test_hosts_are_names(host: str) -> None:
    with pytest.raises(ConfigError, match="picture_hosts"):
        GatewayConfig(picture_hosts=(host,))
    assert GatewayConfig(picture_hosts=("images.example", "*.images.example:8443")).picture_hosts


async def test_a_long_body_with_a_url_is_left_to_the_gateway(seeing: ModelCard) -> None:
    """The process that reads long bodies reads one after another: none of others waits for a host."""
    config, pictures = GatewayConfig(picture_hosts=("images.example",)), PictureReader(fetches=False)
    loaded = ReadingModel(seeing, seeing.load_tokenizer(), config, WorkLanes(), pictures)
    body = {"model": "tiny", "messages": [{"role": "user", "content": [image("https://images.example/")]}]}
    reading = BodyReading("/v1/chat/completions", config, lambda _: loaded)
    assert await reading.read(orjson.dumps(body)) == NotRead()
