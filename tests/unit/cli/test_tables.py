"""Tables that are read and written, and prompts with columns."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli.batch.run import RowPrompt
from alignedserve.cli.batch.tables import open_table, text_of, write_table
from alignedserve.core.errors import ConfigError
from tests.support.marks import each

KINDS = {"answer": "string", "n": "integer", "share": "number", "is": "boolean", "more": "json"}
RESULTS: list[dict[str, Any]] = [
    {"answer": 'a, "b"\n', "n": 1, "share": 1, "is": True, "more": [1, {"a": None}]},
    {"answer": None, "n": None, "share": None, "is": None, "more": None},
    {"answer": "ü\r", "n": 3.0, "share": 2.5, "is": False, "more": "text"},
]
ODD = {"answer": "", "n": 10**20, "share": 10**400, "is": 1, "more": 10**20}


def table_of(folder: Path, name: str, content: bytes) -> Any:
    (folder / name).write_bytes(content)
    return open_table(folder / name)


READ = {
    ("a.csv", b"id,text\n1,x\n\n2,\n"): [{"id": "1", "text": "x"}, {"id": "2", "text": ""}],
    ("a.csv", b'\xef\xbb\xbfid;text\r\n1;"a;b\r\nc"\r\n'): [{"id": "1", "text": "a;b\r\nc"}],
    ("a.csv", b"text\nsole\n"): [{"text": "sole"}],
    ("a.csv", b"\nid;text\n1;x\n"): [{"id": "1", "text": "x"}],
    ("a.csv", b'"a;b;c",text\n1,x\n'): [{"a;b;c": "1", "text": "x"}],
    ("a.csv", b"text\n"): [],
    ("a.tsv", b"id\ta,b\n1\t\xc3\xbc"): [{"id": "1", "a,b": "ü"}],
    ("a.CSV", b'text\n"' + b"x" * 200_000 + b'"\n'): [{"text": "x" * 200_000}],
    ("a.jsonl", b'{"a": 1}\n\n{"b": "\\ud83d!", "a": null}\n'): [{"a": 1, "b": None}, {"a": None, "b": "?!"}],
    ("a.ndjson", b'\xef\xbb\xbf{"a": 123456789012345678901234567890}'): [{"a": 123456789012345678901234567890}],
}


@each("file, rows", READ.items())
def test_rows_as_they_stand_there(file: tuple[str, bytes], rows: list[dict[str, Any]], tmp_path: Path) -> None:
    table = table_of(tmp_path, *file)
    assert list(table.rows(list(table.columns))) == rows
    assert list(table.rows(list(table.columns))) == rows
    assert list(open_table(tmp_path / file[0], limit=1).rows([])) == rows[:1]


REFUSED = {
    ("a.xlsx", b"PK"): "must end in one of",
    ("a.csv", b""): "has no header",
    ("a.csv", b"a,a\n"): "the column 'a' twice",
    ("a.csv", b"a,b\n1,2\n1,2,3\n"): "line 3: 3 cells under 2 columns",
    ("a.csv", b"a,b\n1\n"): "line 2: 1 cells under 2 columns",
    ("a.csv", b'a,b\n1,"x\n2,y\n3,z\n'): "unexpected end of data",
    ("a.csv", b'a,b\n1,"x"y\n'): "line 2",
    ("a.csv", b"a,b\n1,gr\xfc\xdfe\n"): "not text in UTF-8",
    ("a.csv", b"gr\xfc\xdfe\n"): "not text in UTF-8",
    ("a.jsonl", b""): "has no rows",
    ("a.jsonl", b'{"a": 1}\n{"a": \n'): "line 2 is not JSON",
    ("a.jsonl", b"[1]\n"): "line 1 is not a JSON object",
    ("a.jsonl", b"null\n"): "line 1 is not a JSON object",
    ("a.jsonl", b"\xff\n"): "line 1 is not JSON in UTF-8",
    ("a.jsonl", b"[" * 100_000): "line 1 is not JSON in UTF-8",
}


@each("file, message", REFUSED.items())
def test_a_table_with_a_mistake_is_refused(file: tuple[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        list(table_of(tmp_path, *file).rows([]))


def test_a_table_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="must be a regular file"):
        open_table(tmp_path / "a.csv")


@each(
    "value, text",
    [
        (None, ""),
        (float("nan"), ""),
        ("1.10", "1.10"),
        (True, "true"),
        (2.5, "2.5"),
        (float("inf"), "Infinity"),
        (["ü", None, float("nan"), "NaN"], '["ü", null, null, "NaN"]'),
        (b"ab", "ab"),
    ],
)
def test_a_cell_as_text(value: Any, text: str) -> None:
    assert text_of(value) == text


ROW = {"text": "{id} {{", "id": "7", "a b": "c", "": "index"}


@each(
    "prompt, filled",
    [
        ("{text}", "{id} {{"),
        ("{{text}} {text}}}", "{text} {id} {{}"),
        ('{{"id": {id}}}', '{"id": 7}'),
        ("{a b}{}", "cindex"),
        ("none", "none"),
    ],
)
def test_columns_in_a_prompt(prompt: str, filled: str, tmp_path: Path) -> None:
    table = table_of(tmp_path, "a.jsonl", json.dumps(ROW).encode())
    assert RowPrompt("--prompt", prompt, table).fill(ROW) == filled


@each(
    "prompt", ["{", "}", "{text", "text}", "{{text}", "{text.__class__}", "{text!r}", "{0}", '{"a": 1}', "{text}\udcff"]
)
def test_prompts_that_cannot_be_filled_are_refused(prompt: str, tmp_path: Path) -> None:
    table = table_of(tmp_path, "a.jsonl", json.dumps(ROW).encode())
    with pytest.raises(ConfigError, match="--prompt: "):
        RowPrompt("--prompt", prompt, table)


TABLE = b'id;text\r\n"1";"a;b"\r\n2;\r\n3;\xc3\xbc\r\n'


@each(
    "name, content",
    [
        (
            "out.csv",
            'id;text;answer;n;share;is;more\r\n1;"a;b";"a, ""b""\n";1;1;true;"[1, {""a"": null}]"\r\n2;;;;;;\r\n'
            '3;ü;"ü\r";3.0;2.5;false;text\r\n',
        ),
        ("out.tsv", None),
        (
            "out.jsonl",
            '{"id": "1", "text": "a;b", "answer": "a, \\"b\\"\\n", "n": 1, "share": 1, "is": true, '
            '"more": [1, {"a": null}]}\n'
            '{"id": "2", "text": "", "answer": null, "n": null, "share": null, "is": null, "more": null}\n'
            '{"id": "3", "text": "ü", "answer": "ü\\r", "n": 3.0, "share": 2.5, "is": false, "more": "text"}\n',
        ),
    ],
)
def test_results_beside_their_rows(name: str, content: str | None, tmp_path: Path) -> None:
    table = table_of(tmp_path, "a.csv", TABLE)
    write_table(tmp_path / name, table, ["id", "text"], iter(RESULTS), KINDS)
    assert content in (None, (tmp_path / name).read_bytes().decode())
    assert len(list(open_table(tmp_path / name).rows([]))) == 3


def test_json_has_no_infinity(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a.jsonl", b'{"a": Infinity, "b": [NaN, "NaN"], "c": 1e400}')
    write_table(tmp_path / "out.jsonl", table, list(table.columns), iter([{"answer": "ü"}]), {"answer": "string"})
    assert (tmp_path / "out.jsonl").read_text() == '{"a": null, "b": [null, "NaN"], "c": null, "answer": "ü"}\n'


def test_parquet_has_the_types_of_what_is_written(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": 1, "x": 1, "mixed": "a", "text": "ü"}, {"id": None, "x": 2.5, "mixed": 1}, {"id": 3, "x": None}]
    table = table_of(tmp_path, "a.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    write_table(tmp_path / "out.parquet", table, ["id", "x", "mixed", "text"], iter([*RESULTS[:2], ODD]), KINDS)
    written = pq.read_table(tmp_path / "out.parquet")
    assert [str(kind) for kind in written.schema.types] == (
        ["int64", "double", "string", "string", "string", "int64", "double", "bool", "string"]
    )
    assert written.to_pylist() == [
        {"id": 1, "x": 1.0, "mixed": "a", "text": "ü", **RESULTS[0], "more": '[1, {"a": null}]'},
        {"id": None, "x": 2.5, "mixed": "1", "text": None, **RESULTS[1]},
        {"id": 3, "x": None, "mixed": None, "text": None, **dict.fromkeys(KINDS), "answer": "", "more": str(10**20)},
    ]


def test_a_parquet_table_is_read_piece_by_piece(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    times = pa.array([1_000_000_001] * 1_200, pa.timestamp("ns"))  # more than Python's times can hold
    pq.write_table(pa.table({"at": times, "n": range(1_200)}), tmp_path / "a.parquet")
    table = open_table(tmp_path / "a.parquet", limit=700)
    assert [row["n"] for row in table.rows(["n"])] == list(range(700))
    assert next(table.rows(["at"]))["at"] == "1970-01-01 00:00:01.000000001"
    write_table(tmp_path / "out.parquet", table, ["at"], iter([{"answer": "a"}] * 700), {"answer": "string"})
    assert pq.read_table(tmp_path / "out.parquet")["at"].equals(pa.chunked_array([times[:700]]))


FAR = '{"a": ["<value out of range: 9007199254740992>"]}'


def test_parquet_of_every_type_as_text(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = {
        "day": (pa.array([1], pa.date32()), "1970-01-02"),
        "zoned": (pa.array([1_000_000], pa.timestamp("us", "UTC")), "1970-01-01 00:00:01.000000Z"),
        "clock": (pa.array([1_000], pa.time32("ms")), "00:00:01.000"),
        "lasts": (pa.array([5], pa.duration("ns")), "5"),
        "price": (pa.array(["1.10"]).cast(pa.decimal128(5, 2)), "1.10"),
        "kind": (pa.array(["a"]).dictionary_encode(), "a"),
        "bytes": (pa.array([b"a\xff"]), "a\\xff"),
        "parts": (pa.array([[{"n": 1, "at": None}]]), '[{"n": 1, "at": null}]'),
        "times": (pa.array([[1]], pa.list_(pa.timestamp("ns"))), '["1970-01-01 00:00:00.000000001"]'),
        "far": (pa.array([{"a": [2**53]}], pa.struct([("a", pa.list_(pa.timestamp("ms"), 1))])), FAR),
        "map": (pa.array([[(1, 2)]], pa.map_(pa.date32(), pa.int8())), '[["1970-01-02", 2]]'),
        "none": (pa.array([None]), ""),
    }
    pq.write_table(pa.table({name: array for name, (array, _) in cells.items()}), tmp_path / "a.parquet")
    table = open_table(tmp_path / "a.parquet")
    write_table(tmp_path / "out.csv", table, list(cells), iter([{"answer": "ü"}]), {"answer": "string"})
    (row,) = open_table(tmp_path / "out.csv").rows([])
    assert row == {name: text for name, (_, text) in cells.items()} | {"answer": "ü"}
    write_table(tmp_path / "out.jsonl", table, [], iter([{"answer": "ü"}]), {"answer": "string"})
    assert list(open_table(tmp_path / "out.jsonl").rows([])) == [{"answer": "ü"}]


@each("content", [b"", b"PAR1", b"id,text\n"])
def test_a_file_that_is_not_parquet(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        table_of(tmp_path, "a.parquet", content)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alignedserve.cli.batch.parquet", None)
    monkeypatch.delattr("alignedserve.cli.batch.parquet", raising=False)
    with pytest.raises(ConfigError, match=r"Parquet needs pyarrow: pip install 'alignedserve\[tables\]'"):
        table_of(tmp_path, "a.parquet", b"")
