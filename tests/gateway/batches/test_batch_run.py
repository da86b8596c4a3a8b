"""`alignedserve batch run`: every row of a table exactly once, whatever ends meanwhile."""

import asyncio
import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core.request import Request
from tests.gateway.batches.batch_support import eventually
from tests.gateway.batches.command_line import CommandLine, command_line
from tests.gateway.support import EOS, tokenizer
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_impatient")]

_USER, _END = 3, 1  # tokens around a question


def echo(request: Request) -> Script:
    """Say what the user said."""
    prompt = request.prompt_token_ids
    start = prompt.index(_USER) + 1
    return Script((*prompt[start : prompt.index(_END, start)], EOS), tokens_per_step=4)


def slow_echo(request: Request) -> Script:
    return Script(echo(request).token_ids, first_token_delay_s=0.05, tokens_per_step=4)


TEXTS = ["plain", 'a "quote", a comma', "two\nlines\r\n", "{braces} {{text}}", "größe 🦦", " ", "plain", "", "x" * 40]


def csv_file(path: Path, rows: Iterable[Iterable[object]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
async def test_every_row_once_in_its_order(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_file(tmp_path / "texts.csv", [["id", "text"], *enumerate(TEXTS)])
    output = tmp_path / f"out{suffix}"
    async with command_line(tmp_path, capsys, echo) as cli:
        command = ("run", path, "--prompt", "{{{id}}}: {text}", "--output", str(output))
        assert await cli.run(*command) == 1
        assert "9 rows, 2 with an error" in cli.err
        assert await cli.run(*command) == 2
        assert "is there already" in cli.err
    rows = rows_of(output)
    assert list(rows[0]) == ["id", "text", "answer", "finish_reason", "error"]
    assert [(row["id"], row["text"]) for row in rows] == [(str(number), text) for number, text in enumerate(TEXTS)]
    for row in rows:
        is_empty = not row["text"].strip()
        assert (row["error"] or "") == ("invalid_row: column text is empty" if is_empty else "")
        assert (row["answer"] or "") == ("" if is_empty else f"{{{row['id']}}}: {row['text']}")
    assert sorted(os.listdir(tmp_path)) == [f"out{suffix}", "state", "texts.csv"]


async def batches_of(cli: CommandLine) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await cli.served.client.get("/v1/batches?limit=100")).json()["data"]
    return listed[::-1]


def fail(*_: object) -> None:
    raise RuntimeError("killed here")


@pytest.mark.parametrize(
    "killed_at",
    [
        "alignedserve.cli.batch.run.BatchClient.create",
        "alignedserve.cli.batch.run.RunFile.add",
        "alignedserve.cli.batch.run.watch_until_over",
        "alignedserve.cli.batch.run.ResultTail",
        "alignedserve.cli.batch.run.write_table",
        "alignedserve.cli.batch.run.publish",
    ],
)
async def test_a_command_that_was_killed_continues(
    tmp_path: Path, killed_at: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = csv_file(tmp_path / "texts.csv", [["text"], *([f"text {number}"] for number in range(20))])
    output = tmp_path / "out.csv"
    command = ("run", path, "--prompt", "{text}", "--output", str(output))
    async with command_line(tmp_path, capsys, slow_echo, max_lines=8) as cli:
        with monkeypatch.context() as patch:
            patch.setattr(killed_at, fail)
            with pytest.raises(RuntimeError, match="killed"):
                await cli.run(*command)
        assert not output.exists()
        assert await cli.run(*command) == 0, cli.err
        batches = await batches_of(cli)
    assert [batch["request_counts"]["total"] for batch in batches] == [8, 8, 4]
    assert [row["answer"] for row in rows_of(output)] == [f"text {number}" for number in range(20)]
    assert not (tmp_path / "out.csv.run").exists()


async def test_another_question_does_not_continue_an_unfinished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = csv_file(tmp_path / "texts.csv", [["text"], ["hello"]])
    (tmp_path / "s.json").write_text('{"type": "object"}')
    command = ("run", path, "--output", str(tmp_path / "out.csv"), "--prompt")
    others = {
        "--prompt": ("Again: {text}",),
        "--system": ("{text}", "--system", "short"),
        "--schema": ("{text}", "--schema", str(tmp_path / "s.json")),
        "--max-tokens": ("{text}", "--max-tokens", "3"),
        "--temperature": ("{text}", "--temperature", "0"),
        "--limit": ("{text}", "--limit", "1"),
    }
    async with command_line(tmp_path, capsys, echo) as cli:
        with monkeypatch.context() as patch:
            patch.setattr("alignedserve.cli.batch.run.watch_until_over", fail)
            with pytest.raises(RuntimeError, match="killed"):
                await cli.run(*command, "{text}")
        for option, other in others.items():
            assert await cli.run(*command, *other) == 2, option
            assert f"out.csv.run is of an unfinished run with another {option}:" in cli.err
        csv_file(tmp_path / "texts.csv", [["text"], ["hello"], ["world"]])
        assert await cli.run(*command, "{text}") == 2
        assert "with another table:" in cli.err
        csv_file(tmp_path / "texts.csv", [["text"], ["hello"]])
        assert await cli.run(*command, "{text}", "--window", "2h", "--columns", "") == 0
        assert len(await batches_of(cli)) == 1


async def test_rows_of_batches_that_ended_badly_are_sent_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.schemas.MIN_WINDOW_S", 1.0)
    is_slow = True

    def script(request: Request) -> Script:
        said = tokenizer().decode(echo(request).token_ids)
        return Script((EOS,), first_token_delay_s=60.0) if is_slow and "late" in said else echo(request)

    texts = ["early 0", "late 1", "early 2", "late 3", "early 4"]
    path = csv_file(tmp_path / "texts.csv", [["text"], *([text] for text in texts)])
    output = tmp_path / "out.jsonl"
    command = ("run", path, "--prompt", "{text}", "--output", str(output))
    async with command_line(tmp_path, capsys, script) as cli:
        assert await cli.run(*command, "--window", "1s") == 1
        assert "2 rows without an answer: the same command sends them again" in cli.err
        assert [row["answer"] for row in rows_of(output)] == ["early 0", None, "early 2", None, "early 4"]
        assert {row["error"].partition(":")[0] for row in rows_of(output) if row["error"]} == {"batch_expired"}
        is_slow = False
        assert await cli.run(*command, "--window", "1h") == 0
        assert [row["answer"] for row in rows_of(output)] == texts
        assert [batch["request_counts"]["total"] for batch in await batches_of(cli)] == [5, 2]


async def test_a_batch_that_is_cancelled_is_not_sent_again_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = csv_file(tmp_path / "texts.csv", [["text"], *([f"text {number}"] for number in range(9))])
    command = ("run", path, "--prompt", "{text}", "--output", str(tmp_path / "out.csv"))
    never = Script((EOS,), first_token_delay_s=60.0)
    async with command_line(tmp_path, capsys, lambda _: never, max_lines=4) as cli:
        for num_batches in (1, 2):
            running = asyncio.create_task(cli.run(*command))

            async def is_sent(count: int = num_batches) -> bool:
                return len(await batches_of(cli)) == count

            await eventually(is_sent)
            batch_id = (await batches_of(cli))[-1]["id"]
            await cli.served.wait_for(batch_id, "in_progress")
            await asyncio.sleep(0.2)  # the command watches it
            await cli.served.client.post(f"/v1/batches/{batch_id}/cancel")
            assert await running == 1
            assert "9 rows without an answer" in cli.err
            assert len(await batches_of(cli)) == num_batches


async def test_a_batch_over_a_limit_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_file(tmp_path / "texts.csv", [["text"], ["hello"]])
    command = ("run", path, "--prompt", "{text}", "--output", str(tmp_path / "out.csv"))
    slow = Script((EOS,), first_token_delay_s=1.0)
    async with command_line(tmp_path, capsys, lambda _: slow, max_active=1) as cli:
        await cli.served.submit(chat_lines(1))
        assert await cli.run(*command) == 0, cli.err
    assert "429: This key has 1 batches that are not over; trying again" in cli.err


async def test_a_run_of_which_nothing_was_sent_may_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = csv_file(tmp_path / "texts.csv", [["text"], ["hello"]]), tmp_path / "out.jsonl"
    async with command_line(tmp_path, capsys, echo) as cli:
        with monkeypatch.context() as patch:
            patch.setattr("alignedserve.cli.batch.run.BatchClient.upload", fail)
            with pytest.raises(RuntimeError, match="killed"):
                await cli.run("run", path, "--prompt", "{text}", "--output", str(output))
        assert (tmp_path / "out.jsonl.run").exists()
        assert await cli.run("run", path, "--prompt", "say {text}", "--output", str(output)) == 0
        assert [row["answer"] for row in rows_of(output)] == ["say hello"]


@pytest.mark.parametrize(
    "content", [b"precious", b"precious\n", b'{"run_id": 1}\n', b'{"run_id":"a","settings":{}}\n../x\n']
)
async def test_a_file_that_is_not_of_a_run_is_left_alone(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = csv_file(tmp_path / "texts.csv", [["text"], ["hello"]])
    (tmp_path / "out.csv.run").write_bytes(content)
    async with command_line(tmp_path, capsys, echo) as cli:
        assert await cli.run("run", path, "--prompt", "{text}", "--output", str(tmp_path / "out.csv")) == 2
    assert (tmp_path / "out.csv.run").read_bytes() == content


async def test_a_server_that_lost_its_batches_is_asked_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = csv_file(tmp_path / "texts.csv", [["text"], ["hello"], ["world"]]), tmp_path / "out.jsonl"
    command = ("run", path, "--prompt", "{text}", "--output", str(output))
    async with command_line(tmp_path / "one", capsys, echo) as cli:
        with monkeypatch.context() as patch:
            patch.setattr("alignedserve.cli.batch.run.write_table", fail)
            with pytest.raises(RuntimeError, match="killed"):
                await cli.run(*command)
    async with command_line(tmp_path / "two", capsys, echo) as cli:
        assert await cli.run(*command) == 0
        assert "its rows are sent again" in cli.err
    assert [row["answer"] for row in rows_of(output)] == ["hello", "world"]


async def test_a_first_try_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_file(tmp_path / "texts.csv", [["id", "text"], *([number, "hello world"] for number in range(9))])
    async with command_line(tmp_path, capsys, echo) as cli:
        assert await cli.run("run", path, "--prompt", "{text}", "--limit", "2", "--max-tokens", "1") == 0
        rows = [json.loads(line) for line in cli.out.splitlines()]
        assert [(row["id"], row["answer"], row["finish_reason"]) for row in rows] == [
            ("0", "hello", "length"),
            ("1", "hello", "length"),
        ]
        assert "2 rows, 2 cut by --max-tokens or the end of the context" in cli.err
        assert await cli.run("run", path, "--prompt", "{text}") == 2
        assert "--output: name a file" in cli.err


async def test_properties_of_a_schema_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}, "more": {}},
    }
    (tmp_path / "s.json").write_text(json.dumps(schema), encoding="utf-8-sig")
    texts = ['{"city": "Rom, \\ud83d", "days": 3, "more": ["a"]}', '{"city": "Ulm"}', '{"city": "U', "[1]"]
    path = csv_file(tmp_path / "texts.csv", [["text"], *([text] for text in texts)])
    command = ("run", path, "--prompt", "{text}", "--schema", str(tmp_path / "s.json"), "--columns", "", "--output")
    async with command_line(tmp_path, capsys, echo) as cli:
        assert await cli.run(*command, str(tmp_path / "out.jsonl")) == 1
        assert await cli.run(*command, str(tmp_path / "out.csv")) == 1
        file_id = (await batches_of(cli))[0]["input_file_id"]
        line = json.loads((await cli.served.results(file_id))[0])
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert line["body"]["response_format"] == form
    rows = rows_of(tmp_path / "out.jsonl")
    assert [(row["city"], row["days"], row["more"]) for row in rows] == [
        ("Rom, ?", 3, ["a"]),
        ("Ulm", None, None),
        (None, None, None),
        (None, None, None),
    ]
    assert [row["error"] for row in rows] == [None, None, "the answer is not JSON", None]
    assert [(row["city"], row["days"], row["more"]) for row in rows_of(tmp_path / "out.csv")][:2] == [
        ("Rom, ?", "3", '["a"]'),
        ("Ulm", "", ""),
    ]


async def test_what_is_refused_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_file(tmp_path / "texts.csv", [["id", "text"], [1, "hello"]])
    (tmp_path / "s.json").write_text('{"type": "object", "properties": {"id": {}}}')
    (tmp_path / "error.json").write_text('{"type": "object", "properties": {"error": {}}}')
    (tmp_path / "bad.json").write_text('{"type": "otter"}')
    out = ("--output", str(tmp_path / "out.csv"))
    refused = {
        ("--prompt", "{body}", *out): "no column 'body' in the table; it has id, text; write {{ and }} for braces",
        ("--prompt", "hello", *out): "--prompt: names no column; the table has id, text",
        ("--prompt", "{text", *out): "--prompt: a single {; write {{",
        ("--prompt", "{text}", "--system", "{who}", *out): "--system: no column 'who'",
        ("--prompt", "{text}", "--columns", "id,body", *out): "--columns: no column 'body'",
        ("--prompt", "{text}", "--schema", str(tmp_path / "s.json"), *out): "column 'id'",
        ("--prompt", "{text}", "--schema", str(tmp_path / "error.json"), *out): "property 'error'",
        ("--prompt", "{text}", "--schema", str(tmp_path / "bad.json"), *out): "--schema",
        ("--prompt", "{text}", "--schema", path, *out): "is not a file of JSON",
        ("--prompt", "{text}", "--schema", str(tmp_path / "none.json"), *out): "does not exist",
        ("--prompt", "{text}", "--window", "2y", *out): "--window must be a duration",
        ("--prompt", "{text}", "--model", "otter", *out): "--model otter: not served",
        ("--prompt", "{text}", "--output", path): "is there already",
        ("--prompt", "{text}", "--output", str(tmp_path / "out.xlsx")): "must end in one of .csv",
        ("--prompt", "{text}", "--output", str(tmp_path / "none" / "out.csv")): "cannot be written",
    }
    async with command_line(tmp_path, capsys, echo) as cli:
        for options, message in refused.items():
            assert await cli.run("run", path, *options) == 2, options
            assert message in cli.err, cli.err
        assert (await cli.served.client.get("/v1/files")).json()["data"] == []
    assert not (tmp_path / "out.csv.run").exists()


async def test_a_key_without_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_: object) -> tuple[str, ...]:
        return ()

    path = csv_file(tmp_path / "texts.csv", [["text"], ["hello"]])
    monkeypatch.setattr("alignedserve.cli.batch.run.BatchClient.models", none)
    async with command_line(tmp_path, capsys, echo) as cli:
        assert await cli.run("run", path, "--prompt", "{text}", "--limit", "1") == 2
        assert f"{cli.url} lists no model for this key" in cli.err


async def test_errors_of_the_server_are_in_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["hello", "fox " * 400, "y" * 5 * 1024 * 1024]
    path, output = csv_file(tmp_path / "texts.csv", [["text"], *([text] for text in texts)]), tmp_path / "out.jsonl"
    async with command_line(tmp_path, capsys, echo) as cli:
        assert await cli.run("run", path, "--prompt", "{text}", "--columns", "", "--output", str(output)) == 1
    ok, long, longest = (row["error"] for row in rows_of(output))
    assert ok is None
    assert long.startswith("400 context_length_exceeded: ")
    assert longest == "invalid_row: longer than a line of 4194304 bytes"
    assert not (tmp_path / "out.jsonl.run").exists()


async def test_parquet_keeps_its_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"at": pa.array([1, None], pa.timestamp("ns")), "text": ["hello", None], "tags": [["a"], []]})
    pq.write_table(table, tmp_path / "texts.parquet")
    output = tmp_path / "out.parquet"
    async with command_line(tmp_path, capsys, echo) as cli:
        assert await cli.run("run", str(tmp_path / "texts.parquet"), "--prompt", "{text}", "--output", str(output)) == 1
    written = pq.read_table(output)
    assert written.select(table.column_names).equals(table)
    assert written["answer"].to_pylist() == ["hello", None]
    assert written["error"].to_pylist() == [None, "invalid_row: column text is empty"]
