"""All named lengths, traces and rate profiles: what ships with the package, and what a data folder adds."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from lab.workload.arrivals import RateProfile
from lab.workload.distributions import IntArray, LengthSource, TokenLengths, ValueDistribution, parse_number, whole
from lab.workload.recordings import ClientDaySource, TraceSource
from lab.workload.servegen import read_clients
from lab.workload.text_lines import columns_of, is_json, parse_length, parsed_lines, read_lines
from lab.workload.traces import TERMS_COLUMNS, parse_trace, read_trace

# Texts have no tokenizer with them: their pieces (words and signs) are counted. On Alpaca outputs there are 0.82 of
# them per token of the LLaMA tokenizer.
_PIECE = re.compile(r"\w+|[^\w\s]")
PIECES_PER_TOKEN = 0.82
NO_FILTER: Mapping[str, str] = MappingProxyType({})
SHIPPED = Path(__file__).parent / "shipped"
DATA_VARIABLE = "ALIGNEDSERVE_DATA"
_CC_BY, _APACHE, _MIT, _NONE = "CC-BY 4.0", "Apache-2.0", "MIT", "none stated"


def read_lengths(
    path: Path, *, prompt: str | None, output: str | None, where: Mapping[str, str] = NO_FILTER
) -> TokenLengths:
    """Read named columns of a CSV file, from the rows whose other columns match `where`. Raises ConfigError."""
    lines = read_lines(path)
    columns = columns_of(lines, str(path))
    needed = [name for name in (prompt, output, *where) if name is not None]
    missing = [name for name in needed if name not in columns.names]
    if missing:
        raise ConfigError(f"{path}:1: the column {missing[0]} is missing")

    def parse(line: str) -> tuple[int, int] | None:
        fields = columns.fields(line)
        if any(fields[name] != wanted for name, wanted in where.items()):
            return None
        return (
            1 if prompt is None else parse_length(fields[prompt], least=1),
            1 if output is None else parse_length(fields[output]),
        )

    rows = [row for row in parsed_lines(lines[1:], 2, parse, str(path)) if row is not None]
    if not rows:
        raise ConfigError(f"{path}: no lengths in it")
    prompt_len, output_len = np.array(rows, dtype=np.int64).T
    return TokenLengths(None if prompt is None else prompt_len, None if output is None else output_len)


# --- texts ------------------------------------------------------------------------------------------------------------


def count_pieces(text: str) -> int:
    return max(1, round(len(_PIECE.findall(text)) / PIECES_PER_TOKEN))


def read_texts(path: Path, *, prompt: Sequence[str], output: str, where: Mapping[str, str] = NO_FILTER) -> TokenLengths:
    """Read the lengths of prompts (fields of a JSON object per line, joined by newlines) and of their answers.

    Only rows with the fields of `where`. Raises ConfigError.
    """

    def parse(line: str) -> tuple[str, str] | None:
        fields = msgspec.json.decode(line, type=dict[str, object])
        if any(fields.get(name) != wanted for name, wanted in where.items()):
            return None
        values = [fields.get(name) for name in (*prompt, output)]
        texts = [text for text in values if isinstance(text, str)]
        if len(texts) < len(values):
            raise ValueError(f"needs texts named {', '.join((*prompt, output))}")
        return "\n".join(text for text in texts[:-1] if text), texts[-1]

    rows = [row for row in parsed_lines(read_lines(path), 1, parse, str(path)) if row is not None]
    if not rows:
        raise ConfigError(f"{path}: no texts in it")
    return TokenLengths(
        prompt_len=np.array([count_pieces(text) for text, _ in rows], dtype=np.int64),
        output_len=np.array([count_pieces(answer) for _, answer in rows], dtype=np.int64),
    )


# --- LongBench --------------------------------------------------------------------------------------------------------

TOKENS_PER_WORD = 1.3
PROMPT_DEVIATION = 0.5  # of the mean


@dataclass(frozen=True, slots=True)
class LongBenchTask:
    """One task of LongBench, as its table describes it."""

    name: str
    prompt: ValueDistribution
    max_output: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class TaskTable:
    """TokenLengths of tasks whose means alone are known.

    Assumptions, as the table has no distributions: prompts are log-normal around the task's mean number of words
    (Chinese: characters) times TOKENS_PER_WORD, with a deviation of half that; answers are evenly spread between one
    token and the task's limit. Tasks come as often as they have samples.
    """

    tasks: tuple[LongBenchTask, ...]

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        samples = np.array([task.num_samples for task in self.tasks], dtype=np.float64)
        chosen = rng.choice(len(self.tasks), size=count, p=samples / samples.sum())
        prompts = np.stack([whole(task.prompt.draw(rng, count)) for task in self.tasks])
        limits = np.array([task.max_output for task in self.tasks])[chosen]
        output_len: IntArray = rng.integers(1, limits, endpoint=True)
        return TokenLengths(prompts[chosen, np.arange(count)], output_len)


def read_tasks(path: Path, *, only: Sequence[str] = ()) -> TaskTable:
    """Read LongBench's table of tasks, or some of them. Raises ConfigError."""
    lines = read_lines(path)
    columns = columns_of(lines, str(path))

    def parse(line: str) -> LongBenchTask:
        fields = columns.fields(line)
        try:
            mean = parse_number("avg_len", fields["avg_len_words_or_zh_chars"]) * TOKENS_PER_WORD
            return LongBenchTask(
                name=fields["task"],
                prompt=ValueDistribution("skewed", (mean, mean * PROMPT_DEVIATION)),
                max_output=parse_length(fields["max_output_tokens"], least=1),
                num_samples=int(fields["samples"]),
            )
        except KeyError as error:
            raise ValueError(f"the column {error} is missing") from error

    tasks = tuple(task for task in parsed_lines(lines[1:], 2, parse, str(path)) if not only or task.name in only)
    if not tasks:
        raise ConfigError(f"{path}: no tasks in it")
    return TaskTable(tasks)


# --- rates by the minute ----------------------------------------------------------------------------------------------


def read_profile(path: Path) -> RateProfile:
    """Read BurstGPT's tokens per second by minute, as weights of a rate; a minute that is missing had no request."""

    def parse(line: str) -> tuple[int, float]:
        minute, _, tokens = line.partition(",")
        number, weight = int(minute), parse_number("total_tokens_per_s", tokens)
        if number < 0 or weight < 0:
            raise ValueError("minute and tokens must not be negative")
        return number, weight

    by_minute = dict(parsed_lines(read_lines(path)[1:], 2, parse, str(path)))
    if not any(by_minute.values()):
        raise ConfigError(f"{path}: no minutes in it")
    return RateProfile(60.0, tuple(by_minute.get(minute, 0.0) for minute in range(max(by_minute) + 1)))


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """A name, the file behind it, and how it is read."""

    file: str
    read: Callable[[Path], LengthSource]
    licence: str
    about: str
    is_shipped: bool = False


def _trace(path: Path) -> LengthSource:
    return TraceSource(read_trace(path))


def _client_day(path: Path) -> LengthSource:
    return ClientDaySource(read_clients(path))


_tokens = partial(read_lengths, prompt="input_tokens", output="output_tokens")


def _apex(dataset: str) -> Callable[[Path], LengthSource]:
    return partial(_tokens, where={"dataset": dataset, "tokenizer": "llama"})


_SUMMARIES = ("gov_report", "qmsum", "multi_news", "vcsum")  # of Apt-Serve's and DistServe's public settings
_APEX = "apex_lengths.csv.gz"

SOURCES: Mapping[str, SourceEntry] = {
    "alpaca": SourceEntry(
        "alpaca_12k.jsonl.gz",
        partial(read_texts, prompt=("instruction", "input"), output="output", where={"origin": "uniform"}),
        "CC BY-NC 4.0",
        "Alpaca instructions with text, 7 383 rows drawn uniformly; lengths counted in pieces",
    ),
    "alpaca_vicuna": SourceEntry(
        "alpaca_vicuna7b_output_lengths.csv.gz",
        partial(read_lengths, prompt=None, output="len_t0.0"),
        _NONE,
        "answers of Vicuna-7B to Alpaca instructions (at most 512); no prompts",
    ),
    "arxiv": SourceEntry("arxiv.csv.gz", _tokens, _MIT, "arXiv summarisation (vidur), 5 000 rows", is_shipped=True),
    "arxiv_full": SourceEntry(
        "arxiv_summarization_lengths_llama2.csv.gz", _tokens, _MIT, "the same, 22 605 rows"
    ),
    "azure_code": SourceEntry(
        "azure_code.csv.gz", _trace, _CC_BY, "Azure LLM trace 2023, code completion, 38 minutes", is_shipped=True
    ),
    "azure_conv": SourceEntry(
        "azure_conv.csv.gz", _trace, _CC_BY, "Azure LLM trace 2023, conversations, 44 minutes", is_shipped=True
    ),
    "azure_conv_slice": SourceEntry(
        "azure_conv_slice.csv", _trace, _CC_BY, "two minutes of it: the demo's trace", is_shipped=True
    ),
    "creation": SourceEntry(_APEX, _apex("creation"), _MIT, "APEX: long answers"),
    "humaneval": SourceEntry(
        "humaneval.jsonl.gz",
        partial(read_texts, prompt=("prompt",), output="canonical_solution"),
        _MIT,
        "HumanEval problems with text; lengths counted in pieces",
    ),
    "lmsys": SourceEntry(_APEX, _apex("lmsys"), _MIT, "APEX: conversations of LMSYS-Chat-1M, 816 rows"),
    "lmsys_vicuna": SourceEntry(
        "lmsys_vicuna13b_output_lengths.csv.gz",
        partial(read_lengths, prompt=None, output="output_tokens"),
        _APACHE,
        "answers of Vicuna-13B to LMSYS-Chat-1M (at most 511); no prompts",
    ),
    "longbench": SourceEntry(
        "longbench_tasks.csv", read_tasks, _MIT, "LongBench, all tasks, from their mean lengths (spread assumed)"
    ),
    "longbench_summaries": SourceEntry(
        "longbench_tasks.csv", partial(read_tasks, only=_SUMMARIES), _MIT, "its summarisation tasks"
    ),
    "mooncake": SourceEntry(
        "mooncake.jsonl.gz", _trace, _APACHE, "Mooncake conversations, 20 minutes", is_shipped=True
    ),
    "mooncake_full": SourceEntry(
        "mooncake_conversation.jsonl.gz", _trace, _APACHE, "the same, 48 minutes"
    ),
    "mooncake_synthetic": SourceEntry(
        "mooncake_synthetic.jsonl.gz", _trace, _APACHE, "Mooncake's synthetic trace, 14 minutes"
    ),
    "servegen": SourceEntry(
        "servegen_deepseek_r1_day.jsonl.gz", _client_day, _APACHE, "ServeGen: a day of 66 clients of DeepSeek-R1"
    ),
    "sharegpt": SourceEntry(
        "sharegpt.csv.gz", _tokens, _APACHE, "ShareGPT with history (sarathi-serve), 5 000 rows", is_shipped=True
    ),
    "sharegpt_full": SourceEntry(
        "sharegpt_8k_lengths_llama2.csv.gz", _tokens, _APACHE, "the same, 24 584 rows"
    ),
    "sharegpt_o1": SourceEntry("sharegpt_o1_lengths.csv.gz", _tokens, _NONE, "ShareGPT prompts, reasoning answers"),
    "sharegpt_text": SourceEntry(
        "sharegpt_first_turn_text.jsonl.gz",
        partial(read_texts, prompt=("prompt",), output="response"),
        _APACHE,
        "ShareGPT first turns with text; lengths counted in pieces",
    ),
    "sharegpt_turns": SourceEntry(
        "sharegpt_gpt4_multiturn_300.csv", _tokens, _MIT, "ShareGPT conversations of several turns, 240 rows"
    ),
    "summarization": SourceEntry(_APEX, _apex("summarization"), _MIT, "APEX: long prompts"),
}  # fmt: skip

# Models whose tokenizers counted the lengths, where sources name a model.
TOKENS_OF: Mapping[str, str] = {
    **dict.fromkeys(("alpaca_vicuna", "arxiv", "arxiv_full", "lmsys_vicuna", "sharegpt", "sharegpt_full"), "llama-2"),
    "servegen": "deepseek-r1",
}

PROFILES: Mapping[str, str] = {"burstgpt_week": "burstgpt_1_tokens_per_second_by_minute.csv.gz"}


class Library:
    """Library that finds sources by name or path. `data_dir`: the user's folder for what cannot be shipped."""

    def __init__(self, data_dir: Path | None = None) -> None:
        self._data_dir = data_dir
        self._read: dict[str, LengthSource] = {}

    def source(self, name: str) -> LengthSource:
        """Return the source of a name, or of a file of one's own (a trace, or `prompt_len,output_len`). Read once.

        Raises ConfigError listing the valid names.
        """
        if name not in self._read:
            self._read[name] = self._find(name)
        return self._read[name]

    def profile(self, name: str) -> RateProfile:
        """Find a rate profile. Raises ConfigError."""
        if name not in PROFILES:
            raise ConfigError(f"unknown rate profile {name!r}; there are {', '.join(PROFILES)}")
        return read_profile(self._data_file(name, PROFILES[name]))

    def _find(self, name: str) -> LengthSource:
        if "/" in name or "." in name:
            return _own_file(Path(os.path.expanduser(name)))
        if name not in SOURCES:
            raise ConfigError(f"unknown lengths or trace {name!r}; {_names()}")
        entry = SOURCES[name]
        return entry.read(SHIPPED / entry.file if entry.is_shipped else self._data_file(name, entry.file))

    def _data_file(self, name: str, file: str) -> Path:
        if self._data_dir is None:
            raise ConfigError(f"{name} does not ship with AlignedServe: {DATA_VARIABLE} must name a folder with {file}")
        path = self._data_dir / file
        if not path.is_file():
            raise ConfigError(f"{name}: there is no {file} in {self._data_dir}")
        return path


def _own_file(path: Path) -> LengthSource:
    lines = read_lines(path)
    names = set() if is_json(lines) else set(columns_of(lines, str(path)).names)
    if "prompt_len" in names and names.isdisjoint(("arrival_s", *TERMS_COLUMNS)):
        return read_lengths(path, prompt="prompt_len", output="output_len")
    return TraceSource(parse_trace(lines, name=str(path)))


def _names() -> str:
    shipped = [name for name, entry in SOURCES.items() if entry.is_shipped]
    others = [name for name, entry in SOURCES.items() if not entry.is_shipped]
    return (
        f"with the package come {', '.join(shipped)}; from the folder that {DATA_VARIABLE} names, {', '.join(others)}; "
        "a file of your own is named by its path"
    )
