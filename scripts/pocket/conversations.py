"""Training rows: conversations of mixed skills that fill a wanted number of tokens."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from alignedserve.pocket import phrases
from alignedserve.pocket.documents import Reading
from alignedserve.pocket.tasks import (
    PocketTask,
    Skill,
    ask,
    ask_again,
    log_uniform,
    make_counting,
    make_reading,
    make_task,
)

_READING_SKILLS = (Skill.LOOKUP, Skill.NTH_LINE)
_SYSTEM_SHARE = 0.04
_READING_COST = 24  # tokens around and after the text of a reading task


@dataclass(slots=True)
class Row:
    """The tokens of one conversation and what learning each of them counts."""

    token_ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of predicting this very token; 0 outside answers


class ConversationMaker:
    """Makes rows from one random stream; `mixture` (skill -> weight) may be changed between rows."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.mixture: Mapping[Skill, float] = dict.fromkeys(Skill, 1.0)
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        names = ("bos", "end", "system", "user", "assistant")
        self._bos, self._end, self._system, self._user, self._assistant = (_token_id(tokenizer, name) for name in names)

    def make_row(self, length: int) -> Row:
        """Make a row of at most `length` tokens, nearly full."""
        row = Row()
        self._add(row, [self._bos], 0.0)
        if self._rng.random() < _SYSTEM_SHARE:
            self._add(row, [self._system, *self._encode(self._rng.choice(phrases.SYSTEM)), self._end], 0.0)
        if length >= 256 and self._rng.random() < 0.8:
            self._add_reading_turns(row, length)
        misses = 0
        while misses < 3:
            misses += not self._add_turn(row, self._make_short_task(length - len(row.token_ids)), length)
        return row

    def encode_task(self, task: PocketTask) -> Row:
        """Encode one question and its answer as a conversation of its own."""
        row = Row()
        self._add(row, [self._bos], 0.0)
        self._add_turn(row, task, 1 << 20)
        return row

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @staticmethod
    def _add(row: Row, token_ids: list[int], weight: float) -> None:
        row.token_ids += token_ids
        row.weights += [weight] * len(token_ids)

    def _add_turn(self, row: Row, task: PocketTask, length: int) -> bool:
        """Add a turn; return False, and leave the row as it was, when it does not fit."""
        prompt, answer = self._encode(task.prompt), [*self._encode(task.answer), self._end]
        if len(row.token_ids) + len(prompt) + len(answer) + 3 > length:
            return False
        self._add(row, [self._user, *prompt, self._end, self._assistant], 0.0)
        # A long answer counts for more than a short one, but not in proportion.
        self._add(row, answer, len(answer) ** -0.5)
        return True

    def _pick(self, skills: tuple[Skill, ...]) -> Skill:
        return self._rng.choices(skills, [self.mixture[skill] for skill in skills])[0]

    def _add_reading_turns(self, row: Row, length: int) -> None:
        """Add a long text and several questions about it: long contexts pay off only with many answers each."""
        rng = self._rng
        skill = self._pick(_READING_SKILLS)
        num_left = length - len(row.token_ids) - 2 * _READING_COST
        reading = make_reading(skill, rng.randint(num_left // 4, int(num_left * 0.93)), rng)
        if not self._add_turn(row, self._first_question(skill, reading), length):
            return
        for _ in range(rng.randint(1, 10)):
            self._add_turn(row, ask_again(skill, reading, rng), length)

    def _first_question(self, skill: Skill, reading: Reading) -> PocketTask:
        if self._rng.random() < 0.75:
            return ask(skill, reading, self._rng)
        other = self._make_short_task(60)
        return PocketTask(other.skill, f"{reading.text()}\n\n{other.prompt}", other.answer)

    def _make_short_task(self, num_left: int) -> PocketTask:
        rng = self._rng
        skill = self._pick(tuple(Skill))
        if skill in _READING_SKILLS:
            reading = make_reading(skill, log_uniform(12, max(13, min(120, num_left - _READING_COST)), rng), rng)
            return ask(skill, reading, rng)
        if skill is Skill.COUNTING:
            return make_counting(rng, log_uniform(2, max(3, min(300, num_left - _READING_COST)), rng))
        return make_task(skill, rng)


def _token_id(tokenizer: Tokenizer, name: str) -> int:
    token_id = tokenizer.token_to_id(f"<|{name}|>")
    assert token_id is not None, f"the tokenizer has no <|{name}|>"
    return token_id
