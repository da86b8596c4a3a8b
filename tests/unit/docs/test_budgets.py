"""What the code weighs and how hard it is to read, as `make check` counts them."""

import ast

from scripts.sentences import comments, heavy_sentences, vague_locals
from scripts.weight import Weight, excesses, room_of, weigh

SOURCE = '''"""What it is for."""

# Why.
MOST = (
    3,
)


def room() -> int:
    """Return it."""
    return MOST[0]
'''


def test_code_has_neither_docstrings_nor_comments_nor_blank_lines() -> None:
    weight = weigh(SOURCE)
    assert (weight.lines, weight.code) == (11, 5)


def test_a_room_is_a_folder_of_the_first_level_and_of_the_runtime_the_second() -> None:
    assert room_of("router/workers/links.py") == "router"
    assert room_of("alignedserve/api/openai/bodies.py") == "alignedserve/api"
    assert room_of("alignedserve/runtime/kv/block_runs.py") == "alignedserve/runtime/kv"


def test_a_room_above_its_budget_or_without_one_is_named() -> None:
    rooms = {"router": Weight((7, 4)), "kvpool": Weight((3,)), "tests/unit": Weight((900,))}
    limits = {"router": 10, "core": 20, "tests": 900, "laboratory": 0, "plugins": 0, "measuring": 0, "rest": 0}
    assert [line.split(";")[0] for line in excesses(rooms, limits)] == ["router has 11 lines", "kvpool has 3 lines"]


def test_a_sentence_is_heavy_by_its_pronouns() -> None:
    hard = "Let those of these requests that are here leave, and those that are away come back."
    plain = "Start swapping each chosen request: out if it is on this worker, in if the pool has it."
    assert list(heavy_sentences(f"{hard} {plain}")) == [hard]


def test_comments_in_a_row_are_one_and_vague_locals_are_counted() -> None:
    texts = [text for text in comments("x = 1  # of one\n# thought\n\n# another\n") if text]
    assert texts == ["of one thought", "another"]
    assert list(vague_locals(ast.parse("def of(one):\n    found = [own for own in one]\n"))) == ["one", "found", "own"]
