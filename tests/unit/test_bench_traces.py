import gzip
from pathlib import Path

import pytest

from alignedserve.bench.checked_trace import shipped_trace
from alignedserve.bench.traces import TraceRow, mean_rate, parse_trace, read_trace, sped_up, window
from alignedserve.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:00.7500000,396,109
"""
MOONCAKE = """{"timestamp": 2000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
"""


def test_azure_dates_become_seconds_since_the_first_row() -> None:
    assert parse_trace(AZURE.splitlines(), name="t") == [TraceRow(0.0, 374, 44), TraceRow(1.25, 396, 109)]


def test_azure_relative_seconds() -> None:
    rows = parse_trace(["TIMESTAMP,ContextTokens,GeneratedTokens", "10.5,3,4", "", "11,5,6"], name="t")
    assert rows == [TraceRow(0.0, 3, 4), TraceRow(0.5, 5, 6)]


def test_mooncake_milliseconds() -> None:
    assert parse_trace(MOONCAKE.splitlines(), name="t") == [TraceRow(0.0, 6758, 500), TraceRow(1.5, 7322, 490)]


def test_rows_out_of_order_are_sorted() -> None:
    rows = parse_trace(["TIMESTAMP,ContextTokens,GeneratedTokens", "2,1,1", "1,2,2"], name="t")
    assert [row.prompt_len for row in rows] == [2, 1]


def test_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1.0,2", "2 fields"),
        ("yesterday,2,3", "isoformat"),
        ("1.0,two,3", "two"),
        ("1.0,0,3", "out of range"),
        ("1.0,2,-3", "out of range"),
        ("nan,2,3", "not a time"),
    ],
)
def test_malformed_azure_line_names_its_number(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.csv:3: .*{complaint}"):
        parse_trace(["TIMESTAMP,ContextTokens,GeneratedTokens", "0,1,1", line], name="trace.csv")


@pytest.mark.parametrize("line", ["{", '{"timestamp": 1}', '{"timestamp": 1, "input_length": "a", "output_length": 2}'])
def test_malformed_mooncake_line_names_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match=r"t:2: "):
        parse_trace([MOONCAKE.splitlines()[0], line], name="t")


@pytest.mark.parametrize(
    "content", [b"", b"a,b,c\n1,2,3\n", b"\x1f\x8bnot gzip", b"\xff\xfe", b"TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_trace(path)


def test_window_moves_its_start_to_zero() -> None:
    rows = [TraceRow(float(second), second + 1, 1) for second in range(10)]
    assert [(row.arrival_s, row.prompt_len) for row in window(rows, 3.0, 2.0)] == [(0.0, 4), (1.0, 5)]
    with pytest.raises(ConfigError, match="no request between"):
        window(rows, 50.0, None)


def test_speed_and_rate() -> None:
    rows = [TraceRow(float(second), 1, 1) for second in range(11)]
    assert mean_rate(rows) == 1.0
    assert mean_rate(sped_up(rows, 4.0)) == 4.0
    assert mean_rate(rows[:1]) == 0.0


def test_shipped_slice_is_what_its_readme_says() -> None:
    rows = shipped_trace()
    assert len(rows) == 751
    assert rows[-1].arrival_s < 120.0
    assert sum(row.prompt_len for row in rows) / 751 == pytest.approx(1284.9, abs=0.05)
    assert sum(row.output_len for row in rows) / 751 == pytest.approx(199.6, abs=0.05)
