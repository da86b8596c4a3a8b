import gzip
from pathlib import Path

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass, Slo
from lab.workload.requests import TextRun
from lab.workload.traces import (
    Terms,
    TraceRow,
    at_rate,
    mean_rate,
    parse_trace,
    read_trace,
    repeated,
    shipped_trace,
    sped_up,
    window,
)
from tests.support.marks import each

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
    rows = parse_trace(MOONCAKE.splitlines(), name="t")
    assert [(row.arrival_s, row.prompt_len, row.output_len) for row in rows] == [(0.0, 6758, 500), (1.5, 7322, 490)]


def test_hash_ids_name_what_prompts_begin_with() -> None:
    first, second = parse_trace(MOONCAKE.splitlines(), name="t")
    assert first.runs == (TextRun(0, 512), TextRun(1, 512))  # and the prompt goes on with what is its own
    assert first.runs[0] == second.runs[0] != first.runs[1] != second.runs[1]
    (own,) = parse_trace(['{"arrival_s": 1, "prompt_len": 600, "output_len": 2, "hash_ids": [7, 8]}'], name="t")
    assert own.runs == (TextRun(7, 512), TextRun(8, 88))


@each("ids", ["[1, 2, 3]", "[-1]", "[1.5]", "[9223372036854775807]", "[1e99]", '["a"]', "7"])
def test_hash_ids_that_cannot_be_are_refused(ids: str) -> None:
    with pytest.raises(ConfigError, match=r"t:1: .*(hash_ids|Expected|integer|range)"):
        parse_trace(['{"timestamp": 1, "input_length": 1000, "output_length": 2, "hash_ids": ' + ids + "}"], name="t")


def test_a_repetition_has_other_texts() -> None:
    rows = repeated(parse_trace(MOONCAKE.splitlines(), name="t"), 7.0)
    texts = [row.runs[0].text for row in rows]
    assert texts == [0, 0, "1/0", "1/0", "2/0"]


def test_rows_out_of_order_are_sorted() -> None:
    rows = parse_trace(["TIMESTAMP,ContextTokens,GeneratedTokens", "2,1,1", "1,2,2"], name="t")
    assert [row.prompt_len for row in rows] == [2, 1]


def test_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(read_trace(path)) == 2


@each(
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


@each("line", ["{", '{"timestamp": 1}', '{"timestamp": 1, "input_length": "a", "output_length": 2}'])
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


# --- our own formats


def test_own_csv_with_and_without_terms() -> None:
    lines = ["arrival_s,prompt_len,output_len,class,ttft_s,tpot_s,deadline_s,priority"]
    lines += ["5,10,20,,,,,", "6.5,11,21,be,,,60,-1", "", "7,12,22,rt,0.4,0.2,,"]
    assert parse_trace(lines, name="t") == [
        TraceRow(0.0, 10, 20),
        TraceRow(1.5, 11, 21, Terms(RequestClass.BEST_EFFORT, Slo(deadline_s=60.0), -1)),
        TraceRow(2.0, 12, 22, Terms(RequestClass.REAL_TIME, Slo(0.4, 0.2))),
    ]


@each(
    "lines",
    [
        ["prompt_len,output_len,arrival_s", "10,20,1", "11,21,2"],
        ['"arrival_s", "prompt_len","output_len"\r', '"1","10","20"\r', "2,11,21\r"],
        ["GeneratedTokens,TIMESTAMP,ContextTokens", "20,1,10", "21,2,11"],
        ["Model,Timestamp,Request tokens,Response tokens", ",1,10,20", '" ",2,11,21'],
        [
            '{"prompt_len": 10, "output_len": 20, "arrival_s": 1}',
            '{"prompt_len": 11, "output_len": 21, "arrival_s": 2}',
        ],
    ],
)
def test_columns_may_be_quoted_and_have_any_order(lines: list[str]) -> None:
    assert parse_trace(lines, name="t") == [TraceRow(0.0, 10, 20), TraceRow(1.0, 11, 21)]


def test_own_jsonl() -> None:
    lines = [
        '{"arrival_s": 1.0, "prompt_len": 10, "output_len": 20}',
        '{"arrival_s": 1.25, "prompt_len": 10, "output_len": 0, "class": "be", "priority": 3}',
    ]
    assert parse_trace(lines, name="t") == [
        TraceRow(0.0, 10, 20),
        TraceRow(0.25, 10, 0, Terms(RequestClass.BEST_EFFORT, None, 3)),
    ]


@each(
    ("line", "complaint"),
    [
        ("0.5,1,1,rt", "arrival_s 0.5 is before the 1 of an earlier line"),
        ("2,1,1", "3 fields where 4 are expected"),
        ("2,-1,1,rt", "out of range"),
        ("2,1,-1,rt", "out of range"),
        ("2,1.5,1,rt", "prompt_len"),
        ("2,,1,rt", "prompt_len"),
        ("2,1,1,fast", "class"),
        ("-2,1,1,rt", "not a time"),
        ("nan,1,1,rt", "not a time"),
        ("1790000000000,1,1,rt", "are these milliseconds"),
    ],
)
def test_malformed_line_of_our_own_names_its_number(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"night\.csv:3: .*{complaint}"):
        parse_trace(["arrival_s,prompt_len,output_len,class", "1,1,1,rt", line], name="night.csv")


def test_lines_before_the_columns_may_be_empty() -> None:
    lines = ["", " ", "arrival_s,prompt_len,output_len,priority", "1,1,1,5"]
    assert [row.prompt_len for row in parse_trace(lines, name="t")] == [1]
    with pytest.raises(ConfigError, match="t:5: priority 1001 is not from -1000 to 1000"):
        parse_trace([*lines, "1,1,1,1001"], name="t")


def test_objectives_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"t:2: ttft_s 0.0 must be above 0"):
        parse_trace(["arrival_s,prompt_len,output_len,ttft_s", "1,1,1,0"], name="t")


@each(
    ("header", "complaint"),
    [
        ("arrival_s,prompt_len", "t:1: the column output_len is missing"),
        ("arrival_s,prompt_len,output_len,tpot", "t:1: tpot is unknown; the columns are arrival_s, .*tpot_s"),
        ("arrival_s,prompt_len,output_len,prompt_len", "t:1: a column stands there twice"),
        ("prompt_len,output_len", "t:1: the column arrival_s is missing"),
        ("arrival_s;prompt_len;output_len", "t:1: fields are separated by commas, not by ';'"),
        ("when,prompt,output", "t:1: neither the columns of a trace .arrival_s,prompt_len,output_len or TIMESTAMP"),
        ('"arrival_s,prompt_len', "t:1: unexpected end of data in"),
        ('{"prompt_len": 1, "output_len": 2}', "t:1: .*`arrival_s`"),
    ],
)
def test_wrong_columns_of_our_own(header: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_trace([header], name="t")


def test_misspelt_field_of_our_own_jsonl() -> None:
    with pytest.raises(ConfigError, match=r"t:1: .*tpot"):
        parse_trace(['{"arrival_s": 1.0, "prompt_len": 10, "output_len": 20, "tpot": 1}'], name="t")


def test_burstgpt_leaves_failed_requests_out() -> None:
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    lines += ["5,ChatGPT,472,18,490,Conversation log", "6,GPT-4,0,0,0,API log", "45,GPT-4,1087,230,1317,API log"]
    assert parse_trace(lines, name="t") == [
        TraceRow(0.0, 472, 18, model="ChatGPT"),
        TraceRow(40.0, 1087, 230, model="GPT-4"),
    ]
    with pytest.raises(ConfigError, match="t:3: lengths 0 and 5"):
        parse_trace([*lines[:2], "6,GPT-4,0,5,5,API log"], name="t")


def test_repeated_keeps_the_rate() -> None:
    rows = repeated([TraceRow(0.0, 1, 1), TraceRow(1.0, 2, 1)], 5.0)
    assert [(row.arrival_s, row.prompt_len) for row in rows] == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 2), (4.0, 1)]
    with pytest.raises(ConfigError, match="cannot be repeated"):
        repeated([TraceRow(0.0, 1, 1)], 5.0)


def test_what_is_played_has_the_rate_asked_for() -> None:
    rows = [TraceRow(moment, 1, 1) for moment in (0.0, 1.0, 2.0, 10.0, 20.0)]  # busy at first
    assert [row.arrival_s for row in at_rate(rows, 3.0, 1.0, is_repeated=False)] == pytest.approx([0.0, 0.1, 0.2])
    assert [row.arrival_s for row in at_rate(rows, 0.4, None, is_repeated=False)] == [0.0, 0.5, 1.0, 5.0, 10.0]
    assert len(at_rate(rows, 3.0, 10.0, is_repeated=False)) == 5
    assert len(at_rate(rows, 3.0, 10.0, is_repeated=True)) == 30
    with pytest.raises(ConfigError, match="no rate of its own"):
        at_rate(rows[:1], 3.0, 10.0, is_repeated=True)
    with pytest.raises(ConfigError, match="nothing of the trace"):
        at_rate(rows, 0.1, 1.0, is_repeated=True)
