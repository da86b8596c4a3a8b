"""Short questions with checkable answers, for small instruct models: what they know and whether they hold to a form."""

import re
from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its words: a right answer contains at least one word."""

    group: str
    prompt: str
    answers: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.answers[0]

    def accepts(self, text: str) -> bool:
        match = re.search(r"(?<![\w.,])(?:" + "|".join(map(re.escape, self.answers)) + r")(?!\w)", text, re.IGNORECASE)
        return match is not None


@dataclass(frozen=True, slots=True)
class YesNoQuestion(Question):
    """A question whose answer is the first yes or no in it."""

    @override
    def accepts(self, text: str) -> bool:
        match = re.search(r"\b(yes|no)\b", text, re.IGNORECASE)
        return match is not None and match[0].lower() == self.answer


_CAPITALS = (
    ("France", "Paris"), ("Japan", "Tokyo"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin"),
    ("Russia", "Moscow"), ("Egypt", "Cairo"), ("Greece", "Athens"), ("China", "Beijing"), ("Portugal", "Lisbon"),
)  # fmt: skip
_SUMS = ((2, 2), (3, 5), (10, 7), (9, 6), (20, 30), (12, 8), (1, 6), (25, 25), (40, 2), (15, 4))
_OPPOSITES = (
    ("hot", ("cold",)), ("up", ("down",)), ("big", ("small", "little", "tiny")), ("day", ("night",)),
    ("open", ("closed", "close", "shut")), ("early", ("late",)), ("happy", ("sad", "unhappy")), ("fast", ("slow",)),
    ("light", ("dark", "darkness", "heavy")), ("full", ("empty",)),
)  # fmt: skip
_YES_NO = (
    ("Is the sun hot?", "yes"), ("Can a fish live without water for a year?", "no"), ("Is water wet?", "yes"),
    ("Is the moon made of cheese?", "no"), ("Do birds have feathers?", "yes"), ("Can a stone eat?", "no"),
    ("Is Paris a city?", "yes"), ("Do dogs have six legs?", "no"), ("Is snow white?", "yes"),
    ("Is ten smaller than two?", "no"),
)  # fmt: skip
_FACTS = (
    ("Which planet do we live on?", ("Earth",)), ("How many days does a week have?", ("7", "seven")),
    ("How many months does a year have?", ("12", "twelve")), ("Which animal says meow?", ("cat", "cats")),
    ("What do bees make?", ("honey",)), ("What is frozen water called?", ("ice",)),
    ("In which language is 'bonjour' a greeting?", ("French",)), ("Who wrote Romeo and Juliet?", ("Shakespeare",)),
    ("What colour is the sky on a clear day?", ("blue",)), ("What is H2O?", ("water",)),
)  # fmt: skip


def make_questions(num_per_group: int = 10) -> list[Question]:
    questions = _all_questions()
    groups = dict.fromkeys(question.group for question in questions)
    return [
        question
        for group in groups
        for question in [question for question in questions if question.group == group][:num_per_group]
    ]


def _all_questions() -> list[Question]:
    return [
        *(Question("capitals", f"What is the capital of {land}?", (city,)) for land, city in _CAPITALS),
        *(Question("sums", f"What is {left} + {right}?", (str(left + right),)) for left, right in _SUMS),
        *(Question("opposites", f"What is the opposite of '{word}'?", answers) for word, answers in _OPPOSITES),
        *(YesNoQuestion("yes or no", f"{text} Answer with yes or no.", (answer,)) for text, answer in _YES_NO),
        *(Question("facts", text, answers) for text, answers in _FACTS),
    ]
