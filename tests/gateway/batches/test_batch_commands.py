"""`alignedserve batch` against a gateway on a real port."""

import asyncio
import gzip
import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from alignedserve.batches.records import Endpoint
from alignedserve.cli.batch.client import BatchClient, watch_until_over
from alignedserve.cli.batch.input_check import check_file
from alignedserve.core.request import Request
from tests.gateway.batches.batch_server import CuttingProxy, listening
from tests.gateway.batches.batch_support import batch_gateway
from tests.gateway.batches.command_line import command_line
from tests.gateway.support import EOS, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_line, chat_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_impatient")]


def written(folder: Path, content: bytes, name: str = "in.jsonl") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def slowly(request: Request) -> Script:
    return Script((*tokens_of("hello"), EOS), first_token_delay_s=0.02)


def never(request: Request) -> Script:
    return Script((EOS,), first_token_delay_s=60.0)


async def test_from_file_to_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, chat_lines(5) + chat_line("odd", n=0))
    async with command_line(tmp_path, capsys) as cli:
        assert await cli.run("submit", path, "--window", "2h", "--metadata", "team=a", "--watch") == 0
        assert "5 of 6 completed, 1 failed" in cli.out
        assert "completed 6/6" in cli.err
        listed = await cli.json("list")
        assert [(one["completion_window"], one["metadata"]) for one in listed] == [("2h", {"team": "a"})]
        batch_id = listed[0]["id"]
        assert (await cli.json("status", batch_id))["status"] == "completed"
        assert await cli.run("results", batch_id) == 0
        assert len({json.loads(line)["custom_id"] for line in cli.out.splitlines()}) == 5
        assert await cli.run("errors", batch_id) == 0
        assert cli.out == "odd: 400 invalid_value: Invalid value for n: Input should be greater than or equal to 1.\n"
        assert await cli.run("errors", batch_id, "--json") == 0
        assert json.loads(cli.out)["custom_id"] == "odd"
        assert await cli.run("cancel", batch_id) == 1
        assert "can no longer be cancelled" in cli.err


async def test_the_list_has_whole_ids_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("alignedserve.cli.console.results", lambda: Console(width=60))
    async with command_line(tmp_path, capsys, is_driven=False) as cli:
        assert await cli.run("submit", written(tmp_path, chat_line("a"))) == 0
        batch_id = cli.out.strip()
        assert await cli.run("list") == 0
        assert f" {batch_id} " in cli.out


async def test_submit_prints_the_id_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    async with command_line(tmp_path, capsys, is_driven=False) as cli:
        assert await cli.run("submit", written(tmp_path, json.dumps(line).encode())) == 0
        assert (await cli.served.batch(cli.out.strip()))["endpoint"] == "/v1/completions"
        assert "fits, ends" in cli.err


async def test_a_file_is_checked_by_the_limits_of_its_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(chat_lines(4))
    async with command_line(tmp_path, capsys, max_lines=3) as cli:
        assert await cli.run("submit", str(path)) == 1
        assert "line 4" in cli.err
        assert (await cli.served.client.get("/v1/files")).json()["data"] == []
        limits = (await cli.served.client.get("/v1/batches/limits")).json()
    assert limits.items() >= {"max_lines": 3, "max_file_bytes": 200_000_000, "max_active_batches": 100}.items()


async def test_a_file_with_mistakes_is_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = b"\n".join([chat_line("a"), b"{", chat_line("a"), *[b"["] * 30])
    async with command_line(tmp_path, capsys, is_driven=False) as cli:
        assert await cli.run("submit", written(tmp_path, content)) == 1
        assert "in.jsonl: line 2: This line is not parseable as valid JSON. (invalid_json_line)\n" in cli.err
        assert "and 12 more\n" in cli.err
        assert cli.err.endswith("in.jsonl was not sent: 32 problems\n")
        assert await cli.run("submit", written(tmp_path, b"{")) == 1
        assert cli.err.endswith("in.jsonl was not sent: 1 problem\n")
        assert (await cli.served.client.get("/v1/files")).json()["data"] == []


GOOD = chat_line("a")
INPUTS = {
    "not JSON": GOOD + b"\nhello\n",
    "not JSONL": b'[{"custom_id": "a"},\n {"custom_id": "b"}]\n',
    "duplicate": GOOD + b"\n\n" + GOOD,
    "no custom_id": b'{"method": "POST"}',
    "method": GOOD.replace(b"POST", b"GET"),
    "url": chat_line("a", url="/v1/moderations"),
    "mixed endpoints": GOOD + b"\n" + chat_line("b", url="/v1/completions"),
    "model": GOOD + b"\n" + chat_line("b", model="gpt-4o"),
    "gzip": gzip.compress(GOOD, mtime=0),
    "UTF-16": GOOD.decode().encode("utf-16"),
    "BOM": b"\xef\xbb\xbf" + GOOD + b"\n",
    "CRLF": GOOD + b"\r\n" + chat_line("b") + b"\r\n",
    "no last line end": GOOD + b"\n" + chat_line("b"),
    "only line ends": b"\r\n\n",
    "a long line": chat_line("b", content="x" * 5 * 1024 * 1024),
    "a line over the context": chat_line("b", content="fox " * 400),
}


@pytest.mark.parametrize("content", INPUTS.values(), ids=INPUTS)
async def test_the_check_says_what_the_server_says(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    checked = check_file(tmp_path / "in.jsonl", Endpoint.CHAT, ("tiny",))
    async with batch_gateway(tmp_path / "state") as served:
        done = await served.wait_for((await served.submit(content))["id"])
    said = (done.get("errors") or {"data": []})["data"]
    found = [
        {"code": one.code, "message": one.message, "param": one.param, "line": one.line} for one in checked.problems
    ]
    assert found == said
    assert done["status"] == ("failed" if found else "completed")
    assert found or done["request_counts"]["total"] == checked.num_lines


async def test_the_same_key_and_file_are_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, chat_lines(2))
    async with command_line(tmp_path, capsys, is_driven=False) as cli:
        assert await cli.run("submit", path, "--idempotency-key", "night-7") == 0
        first = cli.out
        assert await cli.run("submit", path, "--idempotency-key", "night-7") == 0
        assert (cli.out, "before" in cli.err) == (first, True)
        assert len((await cli.served.client.get("/v1/files")).json()["data"]) == 1
        other = written(tmp_path, chat_lines(3))
        assert await cli.run("submit", other, "--idempotency-key", "night-7") == 1
        assert "was used for another request" in cli.err


async def test_submitting_again_after_the_file_is_deleted_finds_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, chat_lines(2))
    async with command_line(tmp_path, capsys) as cli:
        first = await cli.json("submit", path, "--idempotency-key", "night-7")
        await cli.served.wait_for(first["id"])
        assert (await cli.served.client.delete(f"/v1/files/{first['input_file_id']}")).status_code == 200
        assert (await cli.json("submit", path, "--idempotency-key", "night-7"))["id"] == first["id"]
        other = written(tmp_path, chat_lines(3), "other.jsonl")
        assert await cli.run("submit", other, "--idempotency-key", "night-7") == 1


async def test_a_download_whose_connections_break_again_and_again_goes_on_as_long_as_it_comes_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.cli.batch.commands.PATIENCE_S", 0.2)
    async with command_line(tmp_path, capsys) as cli:
        batch = await cli.served.submit(chat_lines(60))
        await cli.served.wait_for(batch["id"])
        proxy = CuttingProxy(cli.url, lambda: 2500)  # of a look at the batch, or a few lines
        async with proxy.listening() as cut:
            assert await cli.run("results", batch["id"], url=cut) == 0
    assert proxy.num_cut > 10
    assert len({json.loads(line)["custom_id"] for line in cli.out.splitlines()}) == 60


async def test_following_over_connections_that_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(7)
    async with command_line(tmp_path, capsys, slowly, max_in_flight=4) as cli:
        batch = await cli.served.submit(chat_lines(60))
        proxy = CuttingProxy(cli.url, lambda: rng.choice((1500, 4000, 9000, 20_000)))
        async with proxy.listening() as url:
            assert await cli.run("results", batch["id"], "--follow", url=url) == 0
        done = await cli.served.batch(batch["id"])
        assert cli.out.splitlines() == await cli.served.results(done["output_file_id"])
    assert len(cli.out.splitlines()) == 60
    assert proxy.num_cut > 3
    assert "trying again" in cli.err


async def test_watching_and_submitting_over_connections_that_break(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(8)
    path = written(tmp_path, chat_lines(60))
    async with command_line(tmp_path, capsys, slowly, max_in_flight=4) as cli:
        proxy = CuttingProxy(cli.url, lambda: rng.choice((0, 50, 600, 3000, None)))
        async with proxy.listening() as url:
            assert await cli.run("submit", path, "--watch", url=url) == 0
        listed = (await cli.served.client.get("/v1/batches")).json()["data"]
    assert len(listed) == 1
    assert proxy.num_cut


async def test_whoever_ends_the_watching_is_told_that_the_batch_goes_on(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    async with batch_gateway(tmp_path, is_driven=False) as served, listening(served.app) as url:
        batch_id = (await served.submit(chat_lines(1)))["id"]
        async with BatchClient(url=url, api_key=None, say=lambda _: None) as client:
            watching = asyncio.create_task(watch_until_over(client, batch_id, console))
            await asyncio.sleep(0)
            watching.cancel()  # as Ctrl-C does
            with pytest.raises(asyncio.CancelledError):
                await watching
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"{batch_id} goes on; `alignedserve batch cancel {batch_id}` ends it\n"


async def test_output_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.jsonl"
    async with command_line(tmp_path, capsys) as cli:
        done = await cli.served.wait_for((await cli.served.submit(chat_lines(30)))["id"])
        whole = (await cli.served.client.get(f"/v1/files/{done['output_file_id']}/content")).content
        for num_bytes in (0, len(whole) // 2, whole.index(b"\n") + 1, len(whole) - 1, len(whole)):
            target.write_bytes(whole[:num_bytes])
            assert await cli.run("results", done["id"], "--output", str(target)) == 0
            assert (target.read_bytes(), cli.out) == (whole, "")
        for foreign in (b"precious", b"precious\n", b"precious\n" * 10_000, b"precious\nhalf"):
            target.write_bytes(foreign)
            assert await cli.run("results", done["id"], "--output", str(target)) == 2
            assert target.read_bytes() == foreign


async def test_batches_that_end_badly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.schemas.MIN_WINDOW_S", 1.0)
    path, bad = written(tmp_path, chat_lines(3)), written(tmp_path, b"{\n", "bad.jsonl")
    async with command_line(tmp_path, capsys, never) as cli:
        assert await cli.run("submit", path, "--window", "1s", "--watch") == 1
        assert "expired" in cli.out
        assert await cli.run("submit", bad, "--no-check", "--watch") == 1
        assert "line 1: This line is not parseable as valid JSON. (invalid_json_line)" in cli.out
        assert await cli.run("submit", path) == 0
        batch_id = cli.out.strip()
        assert await cli.run("cancel", batch_id) == 0
        assert await cli.run("watch", batch_id) == 1
        assert await cli.run("cancel", batch_id) == 0
        assert await cli.run("results", batch_id, "--follow") == 1
        assert await cli.run("results", batch_id) == 0
        assert cli.out == ""
        assert await cli.run("status", batch_id) == 1


async def test_who_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with command_line(tmp_path, capsys, api_keys=("mine",), is_driven=False) as cli:
        assert await cli.run("list") == 1
        assert "set ALIGNEDSERVE_API_KEY" in cli.err
        monkeypatch.setenv("ALIGNEDSERVE_API_KEY", "mine")
        assert await cli.json("list") == []
        assert await cli.run("status", "batch_" + "0" * 24) == 1
        assert cli.err == "error: No such batch.\n"
        assert await cli.run("list", url="http://127.0.0.1:1") == 1
        assert cli.err.startswith("error: nothing answers at http://127.0.0.1:1")
