"""Everything that has a name, and the readers behind the names."""

import json
from pathlib import Path

import numpy as np
import pytest

from alignedserve.config import environment
from alignedserve.core.errors import ConfigError
from lab.workload.catalogue import (
    DATA_VARIABLE,
    SHIPPED,
    SOURCES,
    Library,
    count_pieces,
    read_lengths,
    read_profile,
    read_tasks,
    read_texts,
)
from lab.workload.distributions import TokenLengths
from lab.workload.grammar import parse_classes
from lab.workload.recordings import ClientDaySource, Extract, TraceSource
from lab.workload.servegen import QUANTILES, WINDOW_S, read_clients
from tests.support.marks import each

pytestmark = pytest.mark.slow

SHIPPED_NAMES = sorted(name for name, entry in SOURCES.items() if entry.is_shipped)


def columns(lengths: TokenLengths) -> tuple[list[int], list[int]]:
    assert lengths.prompt_len is not None
    assert lengths.output_len is not None
    return lengths.prompt_len.tolist(), lengths.output_len.tolist()


# --- names


@each(
    ("name", "mean_prompt", "mean_output"),
    [
        ("arxiv", 2591, 285),
        ("azure_code", 2031, 27.6),
        ("azure_conv", 1180, 201),
        ("azure_conv_slice", 1285, 200),
        ("mooncake", 13403, 348),
        ("sharegpt", 2338, 438),
    ],
)
def test_shipped_lengths_are_what_the_table_says(name: str, mean_prompt: float, mean_output: float) -> None:
    prompts, outputs = columns(Library().source(name).draw(np.random.default_rng(0), 20_000))
    assert np.mean(prompts) == pytest.approx(mean_prompt, rel=0.05)
    assert np.mean(outputs) == pytest.approx(mean_output, rel=0.05)


def test_what_ships_is_in_the_package_and_described() -> None:
    assert SHIPPED_NAMES == ["arxiv", "azure_code", "azure_conv", "azure_conv_slice", "mooncake", "sharegpt"]
    readme = (SHIPPED / "README.md").read_text()
    assert {path.name for path in SHIPPED.iterdir()} == {"README.md", *(SOURCES[name].file for name in SHIPPED_NAMES)}
    assert all(SOURCES[name].file in readme for name in SHIPPED_NAMES)


def test_every_name_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "workloads.md").read_text()
    assert [name for name in (*SOURCES, "burstgpt_week") if f"`{name}`" not in page] == []


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown lengths or trace 'shargpt'; .*sharegpt; from the folder .*lmsys"):
        Library().source("shargpt")
    with pytest.raises(ConfigError, match="unknown rate profile 'weekly'; there are burstgpt_week"):
        Library().profile("weekly")


def test_what_does_not_ship_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ALIGNEDSERVE_DATA must name a folder with longbench_tasks\.csv"):
        Library().source("longbench")
    with pytest.raises(ConfigError, match=r"longbench: there is no longbench_tasks.csv in"):
        Library(tmp_path).source("longbench")


def test_the_variable_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert environment.data_dir() == tmp_path
    monkeypatch.delenv(DATA_VARIABLE)
    assert environment.data_dir() is None


def test_files_of_ones_own(tmp_path: Path) -> None:
    lengths, trace = tmp_path / "lengths.csv", tmp_path / "trace.csv"
    lengths.write_text("prompt_len,output_len\n3,4\n")
    trace.write_text("arrival_s,prompt_len,output_len\n1,5,6\n")
    assert columns(Library().source(str(lengths)).draw(np.random.default_rng(0), 2)) == ([3, 3], [4, 4])
    assert columns(Library().source(str(trace)).draw(np.random.default_rng(0), 1)) == ([5], [6])
    with pytest.raises(ConfigError, match="cannot be read"):
        Library().source("./nothing-here.csv")
    trace.write_text('{"prompt_len": 5, "output_len": 6, "arrival_s": 1}\n')
    assert columns(Library().source(str(trace)).draw(np.random.default_rng(0), 1)) == ([5], [6])
    lengths.write_text("prompt_len,output_len,class\n3,4,be\n")
    with pytest.raises(ConfigError, match="the column arrival_s is missing"):
        Library().source(str(lengths))


@each("name", ["~/last night+1@home (2).csv", "./last night+1@home (2).csv"])
def test_paths_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last night+1@home (2).csv").write_text("arrival_s,prompt_len,output_len\n1,5,6\n")
    (spec,) = parse_classes(f"{name}, rate=1")
    assert spec.source is not None
    assert columns(Library().source(spec.source).draw(np.random.default_rng(0), 1)) == ([5], [6])
    with pytest.raises(ConfigError, match=r"~nobody-here/x\.csv: cannot be read"):
        Library().source("~nobody-here/x.csv")


# --- tables and texts


def test_length_table_by_column_and_filter(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("dataset,input_tokens,output_tokens\na,1,2\nb,3,4\na,5,6\n")
    found = read_lengths(path, prompt="input_tokens", output="output_tokens", where={"dataset": "a"})
    assert columns(found) == ([1, 5], [2, 6])
    assert read_lengths(path, prompt=None, output="output_tokens").prompt_len is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a,b\n1,2\n", r"t\.csv:1: the column prompt_len is missing"),
        ("prompt_len,output_len\n1,2\n0,2\n", r"t\.csv:3: length 0 is out of range"),
        ("prompt_len,output_len\n1,-2\n", r"t\.csv:2: length -2 is out of range"),
        ("prompt_len,output_len\n1\n", r"t\.csv:2: 1 fields where 2"),
        ("prompt_len,output_len\nx,1\n", r"t\.csv:2: invalid literal"),
        ("prompt_len,output_len\n", "no lengths in it"),
    ],
)
def test_malformed_length_table_names_the_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_lengths(path, prompt="prompt_len", output="output_len")


def test_the_pieces_of_texts_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    rows = [{"q": "Say hi.", "more": "", "a": "Hi!"}, {"q": "Add", "more": "1 and 2", "a": "It is 3, friend."}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    found = read_texts(path, prompt=("q", "more"), output="a")
    assert columns(found) == ([round(3 / 0.82), round(4 / 0.82)], [round(2 / 0.82), round(6 / 0.82)])
    with pytest.raises(ConfigError, match=r"texts\.jsonl:1: needs texts named q, b"):
        read_texts(path, prompt=("q",), output="b")


def test_an_empty_text_has_one_token() -> None:
    assert count_pieces("") == 1


def test_tasks_come_by_their_samples_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text(
        "task,type,avg_len_words_or_zh_chars,language,samples,max_output_tokens\n"
        "long,QA,10000,EN,100,32\nshort,QA,100,EN,300,4\n"
    )
    prompts, outputs = (np.array(column) for column in columns(read_tasks(path).draw(np.random.default_rng(0), 8000)))
    is_long = prompts > 1000
    assert is_long.mean() == pytest.approx(0.25, abs=0.02)
    assert prompts[is_long].mean() == pytest.approx(13_000, rel=0.05)
    assert set(outputs[~is_long].tolist()) == {1, 2, 3, 4}
    assert [task.name for task in read_tasks(path, only=("short",)).tasks] == ["short"]


def test_profile_fills_missing_minutes(tmp_path: Path) -> None:
    path = tmp_path / "minutes.csv"
    path.write_text("minute,total_tokens_per_s\n0,30.5\n2,10\n")
    assert read_profile(path).weights == (30.5, 0.0, 10.0)
    path.write_text("minute,total_tokens_per_s\n0,30.5\n-2,10\n")
    with pytest.raises(ConfigError, match=r"minutes\.csv:3: .*negative"):
        read_profile(path)


# --- traces as sources


def test_extract_of_a_trace() -> None:
    source = Library().source("azure_conv")
    assert isinstance(source, TraceSource)
    part = source.record(np.random.default_rng(0), Extract(start_s=600.0, duration_s=300.0))
    assert part.arrival_s[0] < 5.0
    assert part.arrival_s[-1] < 300.0
    assert np.all(np.diff(part.arrival_s) >= 0)
    with pytest.raises(ConfigError, match="no request between"):
        source.record(np.random.default_rng(0), Extract(start_s=1e6))


# --- ServeGen


def quantiles(low: int, high: int) -> dict[str, object]:
    return {"mean": 0, "q": [low + (high - low) * share for share in QUANTILES]}


def clients_file(tmp_path: Path, **changes: object) -> Path:
    early = {"input_tokens": quantiles(100, 200), "output_tokens": quantiles(10, 10)}
    late = {"input_tokens": quantiles(1000, 2000), "output_tokens": quantiles(50, 50)}
    windows = [[0, 4.0, 1.0, "Gamma", 1.0, 9.9], [21600, 2.0, 2.0, "Weibull", 0.5428, 9.9]]
    first = {"client": 0, "windows": windows, "lengths": {"0": early, "21600": late}}
    second = {"client": 1, "windows": [[600, 1.0, 0.5, "Gamma", 4.0, 9.9]], "lengths": {"0": early}}
    path = tmp_path / "day.jsonl"
    path.write_text("\n".join(json.dumps(client) for client in (first, second | changes)) + "\n")
    return path


def test_clients_send_at_their_rates_in_their_windows(tmp_path: Path) -> None:
    day = read_clients(clients_file(tmp_path))
    assert day.mean_rate(0.0, 1200.0) == pytest.approx(2.5)
    counts = []
    for seed in range(20):
        arrival_s, lengths = day.generate(np.random.default_rng(seed), start_s=300.0, duration_s=900.0)
        assert np.all(np.diff(arrival_s) >= 0)
        counts.append((np.sum(arrival_s < 300.0), np.sum(arrival_s >= 300.0)))
        prompts, outputs = columns(lengths)
        assert 100 <= min(prompts) <= max(prompts) <= 200
        assert set(outputs) == {10}
    assert np.mean(counts, axis=0) == pytest.approx([1200, 600], rel=0.03)


def test_late_windows_have_their_own_lengths_and_scale(tmp_path: Path) -> None:
    source = ClientDaySource(read_clients(clients_file(tmp_path)))
    extract = Extract(start_s=21600.0, duration_s=WINDOW_S, rate=20.0)
    counts = [len(source.record(np.random.default_rng(seed), extract).arrival_s) for seed in range(10)]
    assert np.mean(counts) == pytest.approx(12_000, rel=0.05)
    prompts, outputs = columns(source.record(np.random.default_rng(0), extract).lengths)
    assert (min(prompts) >= 1000, set(outputs)) == (True, {50})


def test_drawn_lengths_weigh_windows_by_their_rate(tmp_path: Path) -> None:
    _, outputs = columns(read_clients(clients_file(tmp_path)).draw(np.random.default_rng(0), 7000))
    assert np.mean(np.array(outputs) == 50) == pytest.approx(2 / 7, abs=0.02)


def test_parts_without_clients_are_refused(tmp_path: Path) -> None:
    source = ClientDaySource(read_clients(clients_file(tmp_path)))
    with pytest.raises(ConfigError, match="no client sends anything"):
        source.record(np.random.default_rng(0), Extract(start_s=5000.0, duration_s=600.0))
    with pytest.raises(ConfigError, match="no client sends anything"):
        source.record(np.random.default_rng(0), Extract(start_s=1e6))
    with pytest.raises(ConfigError, match="repeat="):
        source.record(np.random.default_rng(0), Extract(duration_s=60.0, is_repeated=True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"windows": [[0, 1.0, 1.0, "Pareto", 1.0, 1.0]]}, "Pareto with rate 1"),
        ({"windows": [[0, 0.0, 1.0, "Gamma", 1.0, 1.0]]}, "Gamma with rate 0"),
        ({"windows": [[0, 1.0]]}, "length"),
        ({"lengths": {}}, "a client without lengths"),
        ({"lengths": {"0": {"input_tokens": {"q": [1, 2]}, "output_tokens": {"q": [1, 2]}}}}, "2 quantiles where 43"),
    ],
)
def test_malformed_client_names_its_line(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"day\.jsonl:2: .*{complaint}"):
        read_clients(clients_file(tmp_path, **changes))
