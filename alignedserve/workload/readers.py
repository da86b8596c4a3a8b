"""Readers of lengths without arrival times: length tables, texts, LongBench's table of tasks; and of rate profiles."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from alignedserve.workload.arrivals import RateProfile
from alignedserve.workload.distributions import ValueDistribution, parse_number
from alignedserve.workload.lengths import IntArray, Lengths, whole
from alignedserve.workload.text_lines import Columns, parse_length, parsed_lines, read_lines

# Texts have no tokenizer with them: their pieces (words and signs) are counted. On Alpaca outputs there are 0.82 of
# them per token of the LLaMA tokenizer.
_PIECE = re.compile(r"\w+|[^\w\s]")
PIECES_PER_TOKEN = 0.82
NO_FILTER: Mapping[str, str] = MappingProxyType({})


def read_lengths(
    path: Path, *, prompt: str | None, output: str | None, where: Mapping[str, str] = NO_FILTER
) -> Lengths:
    """Read named columns of a CSV file, from the rows whose other columns match `where`. Raises ConfigError."""
    lines = read_lines(path)
    columns = Columns(lines[0])
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
    return Lengths(None if prompt is None else prompt_len, None if output is None else output_len)


# --- texts ------------------------------------------------------------------------------------------------------------


def count_pieces(text: str) -> int:
    """Estimate the tokens of a text; at least 1."""
    return max(1, round(len(_PIECE.findall(text)) / PIECES_PER_TOKEN))


def read_texts(path: Path, *, prompt: Sequence[str], output: str, where: Mapping[str, str] = NO_FILTER) -> Lengths:
    """Read the lengths of prompts (fields of a JSON object per line, joined by newlines) and of their answers.

    Only the rows whose other fields are as `where` says. Raises ConfigError.
    """

    def parse(line: str) -> tuple[str, str] | None:
        fields = msgspec.json.decode(line, type=dict[str, object])
        if any(fields.get(name) != wanted for name, wanted in where.items()):
            return None
        found = [fields.get(name) for name in (*prompt, output)]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(found):
            raise ValueError(f"needs texts named {', '.join((*prompt, output))}")
        return "\n".join(text for text in texts[:-1] if text), texts[-1]

    rows = [row for row in parsed_lines(read_lines(path), 1, parse, str(path)) if row is not None]
    if not rows:
        raise ConfigError(f"{path}: no texts in it")
    return Lengths(
        prompt_len=np.array([count_pieces(text) for text, _ in rows], dtype=np.int64),
        output_len=np.array([count_pieces(answer) for _, answer in rows], dtype=np.int64),
    )


# --- LongBench --------------------------------------------------------------------------------------------------------

TOKENS_PER_WORD = 1.3
PROMPT_DEVIATION = 0.5  # of the mean


@dataclass(frozen=True, slots=True)
class Task:
    """One task of LongBench, as its table describes it."""

    name: str
    prompt: ValueDistribution
    max_output: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class TaskTable:
    """Lengths of tasks whose means alone are known.

    Assumptions, as the table has no distributions: prompts are log-normal around the task's mean number of words
    (Chinese: characters) times TOKENS_PER_WORD, with a deviation of half that; answers are evenly spread between one
    token and the task's limit. Tasks come as often as they have samples.
    """

    tasks: tuple[Task, ...]

    def draw(self, rng: Generator, count: int) -> Lengths:
        """Draw `count` requests of all tasks."""
        samples = np.array([task.num_samples for task in self.tasks], dtype=np.float64)
        chosen = rng.choice(len(self.tasks), size=count, p=samples / samples.sum())
        prompts = np.stack([whole(task.prompt.draw(rng, count)) for task in self.tasks])
        limits = np.array([task.max_output for task in self.tasks])[chosen]
        output_len: IntArray = rng.integers(1, limits, endpoint=True)
        return Lengths(prompts[chosen, np.arange(count)], output_len)


def read_tasks(path: Path, *, only: Sequence[str] = ()) -> TaskTable:
    """Read LongBench's table of tasks, or some of them. Raises ConfigError."""
    lines = read_lines(path)
    columns = Columns(lines[0])

    def parse(line: str) -> Task:
        fields = columns.fields(line)
        try:
            mean = parse_number("avg_len", fields["avg_len_words_or_zh_chars"]) * TOKENS_PER_WORD
            return Task(
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
