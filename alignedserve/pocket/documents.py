"""Tables and documents the pocket model reads: made from a random stream, asked about by key or by line number."""

import random
from dataclasses import dataclass

from alignedserve.pocket import phrases
from alignedserve.pocket.words import ADJECTIVES, NOUNS, PLACES, VERBS, WORDS

MAX_NUMBER = 999  # the largest number that is one token
MAX_TABLE_ROWS = 480
MAX_DOCUMENT_LINES = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """A text of rows with one question per row; `answers[i]` is exactly `rows[i]`, so that answering is copying."""

    intro: str  # stands before the rows, may be empty
    rows: tuple[str, ...]  # as they stand in the text and in the answer
    labels: tuple[str, ...]  # what a question names: the key, or the line number
    first_phrases: tuple[str, ...]  # questions that come with the text
    next_phrases: tuple[str, ...]  # questions after an answer about the same text

    def text(self) -> str:
        """Give the whole text, without a question."""
        return self.intro + "\n".join(self.rows)

    def question(self, row: int, rng: random.Random) -> str:
        """Ask for a row, as people ask who just handed the text over."""
        return _fill(rng.choice(self.first_phrases), self.labels[row])

    def next_question(self, row: int, rng: random.Random) -> str:
        """Ask for another row of a text that was asked about before."""
        if rng.random() < 0.5:
            return self.question(row, rng)
        return _fill(rng.choice(self.next_phrases), self.labels[row])

    def with_question(self, question: str, rng: random.Random) -> str:
        """Return the whole user message; the question stands before the text now and then."""
        if rng.random() < 0.25:
            return f"{question}\n\n{self.text()}"
        return f"{self.text()}\n\n{question}"


def _fill(phrase: str, label: str) -> str:
    return phrase.format(k=label, n=label)


def nonsense_word(rng: random.Random, *, max_len: int) -> str:
    """Make letters that are (almost) never a word of the list: the model must read them one by one."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, max_len)))


def make_title(num_words: int, rng: random.Random) -> str:
    """Make a line of `num_words` words, closed by a colon: takes `num_words` + 2 tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words)) + ":\n"


def _make_intro(choices: tuple[str, ...], rng: random.Random) -> str:
    return make_title(rng.randint(1, 12), rng) if rng.random() < 0.2 else rng.choice(choices)


def make_table(num_rows: int, rng: random.Random) -> Reading:
    keys = rng.sample(WORDS, min(num_rows, MAX_TABLE_ROWS))
    rows = tuple(f"{key}: {rng.randint(0, MAX_NUMBER)}" for key in keys)
    intro = _make_intro(phrases.TABLE_INTRO, rng)
    return Reading(intro, rows, tuple(keys), phrases.LOOKUP, phrases.LOOKUP_AGAIN)


def make_sentence(rng: random.Random) -> str:
    """Make a small sentence of the word list, in lower case and without a full stop."""
    subject = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" if rng.random() < 0.5 else f"the {rng.choice(NOUNS)}"
    sentence = f"{subject} {rng.choice(VERBS)} {rng.choice(('a', 'the'))} {rng.choice(NOUNS)}"
    if rng.random() < 0.5:
        sentence += f" {rng.choice(PLACES)} the {rng.choice(NOUNS)}"
    return sentence


def make_document(num_lines: int, rng: random.Random) -> Reading:
    numbers = range(1, min(num_lines, MAX_DOCUMENT_LINES) + 1)
    rows = tuple(f"{number}. {make_sentence(rng)}" for number in numbers)
    labels = tuple(str(number) for number in numbers)
    return Reading(_make_intro(phrases.DOCUMENT_INTRO, rng), rows, labels, phrases.LINE, phrases.LINE_AGAIN)
