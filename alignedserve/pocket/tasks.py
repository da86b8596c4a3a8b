"""Tasks the pocket model is trained on and tested with; each has one exact answer.

Everything is a function of the random stream handed in: the same seed gives the same tasks on every machine.
"""

import dataclasses
import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.pocket import phrases
from alignedserve.pocket.documents import (
    MAX_DOCUMENT_LINES,
    MAX_NUMBER,
    MAX_TABLE_ROWS,
    Reading,
    make_document,
    make_sentence,
    make_table,
    make_title,
    nonsense_word,
)
from alignedserve.pocket.words import WORDS

# Sizes up to which the shipped weights answer reliably; training went a little beyond each (300, 8 and 9).
MAX_COUNTED_NUMBERS = 200
MAX_SORTED_NUMBERS = 7
MAX_REVERSED_LETTERS = 7  # of a word that the model does not know
MAX_ADDEND = 99
MAX_SORTED_NUMBER = 99


class Skill(enum.Enum):
    """Skills that the pocket model has been trained on."""

    COUNTING = "counting"
    SPELLING = "spelling"
    REVERSING = "reversing"
    SORTING = "sorting"
    SUMS = "sums"
    LOOKUP = "lookup"
    NTH_LINE = "nth_line"
    REPEATING = "repeating"
    IDENTITY = "identity"
    REFUSAL = "refusal"


# A skill below 90 % exact match after training leaves this tuple (and the texts in `phrases`).
OFFERED_SKILLS: tuple[Skill, ...] = tuple(Skill)


@dataclass(frozen=True, slots=True)
class PocketTask:
    """A user message and its right answer."""

    skill: Skill
    prompt: str  # the text of the user message
    answer: str  # the one right text of the assistant message


def is_correct(task: PocketTask, answer_text: str) -> bool:
    """Return whether the answer matches exactly, apart from white space around it."""
    return answer_text.strip() == task.answer


def make_task(skill: Skill, rng: random.Random) -> PocketTask:
    """Make a task of this skill, of any size that the skill covers."""
    return _MAKERS[skill](rng)


def log_uniform(low: int, high: int, rng: random.Random) -> int:
    """Draw an integer in [low, high]; every doubling is as likely as the next, so short ones are common."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


# --- one maker per skill -------------------------------------------------------------------------------------------


def make_counting(rng: random.Random, num_numbers: int) -> PocketTask:
    """Make a task of counting `num_numbers` numbers, about as many output tokens; upwards or downwards."""
    low = 1 if rng.random() < 0.25 else rng.randint(0, MAX_NUMBER + 1 - num_numbers)
    if low + num_numbers > 100 and rng.random() < 0.3:
        low = rng.randint(0, max(0, 100 - num_numbers))  # people count small numbers more often
    high = low + num_numbers - 1
    numbers = [str(number) for number in range(low, high + 1)]
    if rng.random() < 0.25:
        prompt = rng.choice(phrases.COUNT_DOWN).format(a=high, b=low)
        return PocketTask(Skill.COUNTING, prompt, " ".join(reversed(numbers)))
    prompts = phrases.COUNT_TO if low == 1 and rng.random() < 0.5 else phrases.COUNT_UP
    return PocketTask(Skill.COUNTING, rng.choice(prompts).format(a=low, b=high), " ".join(numbers))


def _counting(rng: random.Random) -> PocketTask:
    return make_counting(rng, log_uniform(2, MAX_COUNTED_NUMBERS, rng))


def _any_word(rng: random.Random, max_letters: int = 9) -> str:
    word = rng.choice(WORDS) if rng.random() < 0.6 else nonsense_word(rng, max_len=max_letters)
    return word.capitalize() if rng.random() < 0.1 else word


def _spelling(rng: random.Random) -> PocketTask:
    word = _any_word(rng)
    return PocketTask(Skill.SPELLING, rng.choice(phrases.SPELL).format(w=word), " ".join(word))


def _reversing(rng: random.Random) -> PocketTask:
    if rng.random() < 0.3:
        words = rng.sample(WORDS, rng.randint(2, 6))
        prompt = rng.choice(phrases.REVERSE_LIST).format(ws=" ".join(words))
        return PocketTask(Skill.REVERSING, prompt, " ".join(reversed(words)))
    word = _any_word(rng, MAX_REVERSED_LETTERS)
    return PocketTask(Skill.REVERSING, rng.choice(phrases.REVERSE_WORD).format(w=word), word[::-1])


def _sorting(rng: random.Random) -> PocketTask:
    numbers = rng.sample(range(MAX_SORTED_NUMBER + 1), rng.randint(3, MAX_SORTED_NUMBERS))
    separator = rng.choice((" ", ", "))
    prompt = rng.choice(phrases.SORT).format(ns=separator.join(map(str, numbers)))
    return PocketTask(Skill.SORTING, prompt, " ".join(map(str, sorted(numbers))))


def _sums(rng: random.Random) -> PocketTask:
    limit = 20 if rng.random() < 0.25 else MAX_ADDEND
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    return PocketTask(Skill.SUMS, rng.choice(phrases.SUM).format(a=a, b=b), f"{a} + {b} = {a + b}")


def ask(skill: Skill, reading: Reading, rng: random.Random) -> PocketTask:
    """Hand a text over and ask for one of its rows, all in one message."""
    row = rng.randrange(len(reading.rows))
    prompt = reading.with_question(reading.question(row, rng), rng)
    return PocketTask(skill, prompt, reading.rows[row])


def ask_again(skill: Skill, reading: Reading, rng: random.Random) -> PocketTask:
    """Ask about a text that stands earlier in the conversation."""
    row = rng.randrange(len(reading.rows))
    return PocketTask(skill, reading.next_question(row, rng), reading.rows[row])


def _lookup(rng: random.Random) -> PocketTask:
    return ask(Skill.LOOKUP, make_table(log_uniform(3, MAX_TABLE_ROWS, rng), rng), rng)


def _nth_line(rng: random.Random) -> PocketTask:
    return ask(Skill.NTH_LINE, make_document(log_uniform(3, 140, rng), rng), rng)


def _repeating(rng: random.Random) -> PocketTask:
    kind = rng.random()
    if kind < 0.4:
        text = make_sentence(rng)
    elif kind < 0.8:
        text = " ".join(rng.choice(WORDS) for _ in range(log_uniform(1, 30, rng)))
    else:
        text = " ".join(_any_word(rng) for _ in range(rng.randint(1, 6)))
    return PocketTask(Skill.REPEATING, rng.choice(phrases.REPEAT).format(t=text), text)


def _identity(rng: random.Random) -> PocketTask:
    return PocketTask(Skill.IDENTITY, rng.choice(phrases.IDENTITY), phrases.IDENTITY_ANSWER)


def _refusal(rng: random.Random) -> PocketTask:
    kind = rng.random()
    if kind < 0.15:
        return PocketTask(Skill.REFUSAL, rng.choice(phrases.GREETINGS), phrases.GREETING_ANSWER)
    if kind < 0.22:
        return PocketTask(Skill.REFUSAL, rng.choice(phrases.THANKS), phrases.THANKS_ANSWER)
    if kind < 0.3:
        return PocketTask(Skill.REFUSAL, rng.choice(phrases.HELP), phrases.REFUSAL_ANSWER)
    prompt = rng.choice(phrases.OFF_TOPIC).format(
        w=_any_word(rng), v=_any_word(rng), n=rng.randint(0, MAX_NUMBER), m=rng.randint(0, MAX_NUMBER)
    )
    return PocketTask(Skill.REFUSAL, prompt, phrases.REFUSAL_ANSWER)


_MAKERS: dict[Skill, Callable[[random.Random], PocketTask]] = {
    Skill.COUNTING: _counting,
    Skill.SPELLING: _spelling,
    Skill.REVERSING: _reversing,
    Skill.SORTING: _sorting,
    Skill.SUMS: _sums,
    Skill.LOOKUP: _lookup,
    Skill.NTH_LINE: _nth_line,
    Skill.REPEATING: _repeating,
    Skill.IDENTITY: _identity,
    Skill.REFUSAL: _refusal,
}

# --- tasks of a wanted length ---------------------------------------------------------------------------------------

_TOKENS_PER_TABLE_ROW = 4  # key, colon, number, line break
_TOKENS_PER_DOCUMENT_LINE = 11
_QUESTION_TOKENS = 13  # the longest question and the empty line
_GAP_TOKENS = 2  # the empty line between text and question
_TITLE_TOKENS = 2  # colon and line break
_LONG_SKILLS = (Skill.LOOKUP, Skill.NTH_LINE, Skill.COUNTING)


def make_reading(skill: Skill, num_tokens: int, rng: random.Random) -> Reading:
    """Make a table (lookup) or a document (nth_line) of about `num_tokens` tokens."""
    if skill is Skill.LOOKUP:
        return make_table(max(3, min(MAX_TABLE_ROWS, num_tokens // _TOKENS_PER_TABLE_ROW)), rng)
    return make_document(max(2, min(MAX_DOCUMENT_LINES, num_tokens // _TOKENS_PER_DOCUMENT_LINE)), rng)


def make_long_task(
    rng: random.Random,
    num_prompt_tokens: int,
    count_tokens: Callable[[str], int],
    num_output_tokens: int | None = None,
) -> PocketTask:
    """Make a task whose user message has `num_prompt_tokens` tokens within about 5 % (30 to 1 900).

    With `num_output_tokens` (2 to 200) the task is counting after a text, as only its answer can have any length.
    """
    skill = rng.choice(_LONG_SKILLS) if num_output_tokens is None else Skill.COUNTING
    if skill is not Skill.COUNTING:
        return _long_reading(skill, rng, num_prompt_tokens, count_tokens)
    num_numbers = num_output_tokens or log_uniform(2, 60, rng)
    counting = make_counting(rng, max(2, min(MAX_COUNTED_NUMBERS, num_numbers)))
    return _after_text(counting, rng, num_prompt_tokens, count_tokens)


def _long_reading(
    skill: Skill, rng: random.Random, num_prompt_tokens: int, count_tokens: Callable[[str], int]
) -> PocketTask:
    if num_prompt_tokens < 60:
        skill = Skill.LOOKUP  # two lines of a document may already be too long
    source = make_reading(skill, 2 * num_prompt_tokens + 80, rng)
    reading = _fit_rows(source, num_prompt_tokens - _QUESTION_TOKENS, count_tokens)
    row = rng.randrange(len(reading.rows))
    question = reading.question(row, rng)
    num_left = num_prompt_tokens - count_tokens(question) - _GAP_TOKENS
    return PocketTask(
        skill, _fit_title(reading, num_left, rng, count_tokens).with_question(question, rng), reading.rows[row]
    )


def _after_text(
    task: PocketTask, rng: random.Random, num_prompt_tokens: int, count_tokens: Callable[[str], int]
) -> PocketTask:
    num_left = num_prompt_tokens - count_tokens(task.prompt) - _GAP_TOKENS
    if num_left < 8:
        return task
    source = make_reading(
        rng.choice((Skill.LOOKUP, Skill.NTH_LINE)) if num_left > 60 else Skill.LOOKUP, 2 * num_left + 80, rng
    )
    reading = _fit_title(_fit_rows(source, num_left, count_tokens), num_left, rng, count_tokens)
    return PocketTask(task.skill, f"{reading.text()}\n\n{task.prompt}", task.answer)


def _fit_rows(reading: Reading, num_tokens: int, count_tokens: Callable[[str], int]) -> Reading:
    low, high = 1, len(reading.rows)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(_first_rows(reading, middle).text()) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return _first_rows(reading, low)


def _first_rows(reading: Reading, num_rows: int) -> Reading:
    return dataclasses.replace(reading, rows=reading.rows[:num_rows], labels=reading.labels[:num_rows])


def _fit_title(reading: Reading, num_tokens: int, rng: random.Random, count_tokens: Callable[[str], int]) -> Reading:
    bare = dataclasses.replace(reading, intro="")
    num_words = num_tokens - count_tokens(bare.text()) - _TITLE_TOKENS
    if num_words < 1:
        return bare
    return dataclasses.replace(bare, intro=make_title(num_words, rng))
