"""Prompts with the lengths of their answers: made-up tasks that ship with the package, or files of recorded texts."""

import gzip
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.pocket.tasks import OFFERED_SKILLS, make_task
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.text.tokenizer import Tokenizer

MAX_TOKENS = 4096  # limit of every request: no answer is cut off by it
_MAX_BYTES = 256 << 20  # of one file, unpacked
_PIECE = re.compile(r"\w+|[^\w\s]")
_NUM_TASKS = 6000


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and how many tokens its answer had."""

    request: Request
    model_ids: tuple[int, ...]  # the prompt as the pocket model's tokenizer has it
    output_len: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Answered requests, in a random order of their own, for learning and for testing: the latter are the last."""

    name: str
    learnt: Sequence[Answered]
    tested: Sequence[Answered]


def pocket_corpus(seed: int) -> Corpus:
    """Make tasks of all skills of the pocket model in its own tokens; the right answer and the token that ends it."""
    tokenizer = Tokenizer.load(pocket_folder())
    rng = random.Random(seed)  # noqa: S311  (nothing secret)
    tasks = [make_task(rng.choice(OFFERED_SKILLS), rng) for _ in range(_NUM_TASKS)]
    ids = [tuple(tokenizer.encode(task.prompt)) for task in tasks]
    lengths = [len(tokenizer.encode(task.answer, add_special_tokens=False)) + 1 for task in tasks]
    return _split("pocket", list(zip(ids, ids, lengths, strict=True)), seed)


def read_corpus(path: Path, seed: int) -> Corpus:
    """Read a file of JSON lines (`.gz` too) with `prompt` and `response`, or `instruction`, `input` and `output`.

    Tokens are words and punctuation marks, by their checksum, as no tokenizer belongs to such a file. Raises
    ConfigError naming the file and the line.
    """
    tokenizer = Tokenizer.load(pocket_folder())
    rows = []
    for prompt, answer in _texts(path):
        ids = tuple(zlib.crc32(piece.lower().encode()) >> 1 for piece in _PIECE.findall(prompt)) or (0,)
        rows.append((ids, tuple(tokenizer.encode(prompt)), max(len(_PIECE.findall(answer)), 1)))
    if len(rows) < 100:
        raise ConfigError(f"{path}: {len(rows)} texts are too few to learn from and to test with; 100 are needed")
    return _split(path.name.partition(".")[0], rows, seed)


def _split(name: str, rows: list[tuple[tuple[int, ...], tuple[int, ...], int]], seed: int) -> Corpus:
    """Split at random: four fifths to learn from, one to test with.

    The same prompt can be in both, as in real traffic.
    """
    random.Random(seed).shuffle(rows)  # noqa: S311
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    answered = [
        Answered(Request(RequestId(str(index)), ids, sampling, "", 0.0), model_ids, output_len)
        for index, (ids, model_ids, output_len) in enumerate(rows)
    ]
    num_learnt = len(answered) * 4 // 5
    return Corpus(name, answered[:num_learnt], answered[num_learnt:])


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--texts {path}: cannot be read: {error}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"--texts {path}: larger than {_MAX_BYTES >> 20} MiB")
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _prompt_and_answer(line, f"{path}, line {number}")


def _prompt_and_answer(line: bytes, where: str) -> tuple[str, str]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not valid JSON") from None
    if isinstance(fields, dict):
        names = ("prompt", "response") if "prompt" in fields else ("instruction", "output")
        prompt, answer = (fields.get(name) for name in names)
        context = fields.get("input", "")
        if isinstance(prompt, str) and isinstance(answer, str) and isinstance(context, str):
            return f"{prompt}\n{context}".strip(), answer
    raise ConfigError(f"{where}: needs the texts prompt and response, or instruction and output")
