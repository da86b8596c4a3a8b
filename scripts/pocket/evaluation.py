"""Exact match per skill in one forward pass per batch.

When the right answer is fed in and the most likely token is the right one at every position (the end token included),
then greedy decoding gives exactly this answer; so no decoding is needed to know.

    PYTHONPATH=. python scripts/pocket/evaluation.py alignedserve/pocket/model 400
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from conversations import ConversationMaker, Row
from pocket_model import PocketModel, PocketShape
from safetensors.torch import load_file
from tokenizers import Tokenizer

from alignedserve.pocket.tasks import Skill, make_long_task, make_task

_TOKENS_PER_BATCH = 16384


def exact_match(
    model: PocketModel, maker: ConversationMaker, count_tokens: Callable[[str], int], num_tasks: int, seed: int
) -> dict[str, float]:
    """Return the share of right answers per skill, and for `long`: tasks with prompts of 300 to 1 900 tokens."""
    rng = random.Random(seed)
    scores = {}
    for skill in Skill:
        rows = [maker.encode_task(make_task(skill, rng)) for _ in range(num_tasks)]
        scores[skill.value] = _share_right(model, rows)
    tasks = [make_long_task(rng, rng.randint(300, 1900), count_tokens) for _ in range(num_tasks)]
    scores["long"] = _share_right(model, [maker.encode_task(task) for task in tasks])
    return scores


def _share_right(model: PocketModel, rows: list[Row]) -> float:
    max_len = model.shape.max_len
    rows = sorted((row for row in rows if len(row.token_ids) <= max_len), key=lambda row: len(row.token_ids))
    num_right, start = 0, 0
    while start < len(rows):
        stop = start + 1
        while stop < len(rows) and (stop + 1 - start) * len(rows[stop].token_ids) <= _TOKENS_PER_BATCH:
            stop += 1
        num_right += _num_right(model, rows[start:stop])
        start = stop
    return num_right / max(1, len(rows))


@torch.no_grad()
def _num_right(model: PocketModel, rows: list[Row]) -> int:
    length = max(len(row.token_ids) for row in rows)
    tokens = torch.tensor([row.token_ids + [0] * (length - len(row.token_ids)) for row in rows])
    asked = torch.tensor([row.weights + [0.0] * (length - len(row.weights)) for row in rows])[:, 1:] > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(tokens)[:, :-1]
        best = model.logits(hidden[asked]).argmax(-1)
    wrong = torch.zeros_like(asked)
    wrong[asked] = best != tokens[:, 1:][asked]
    return int((~wrong.any(1)).sum())


def main() -> None:
    """Print the exact match of a model folder, given with the number of tasks per skill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_tasks", type=int, help="per skill")
    options = parser.parse_args()
    folder, num_tasks = options.folder, options.num_tasks
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = PocketModel(PocketShape(tokenizer.get_vocab_size()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    maker = ConversationMaker(tokenizer, seed=0)
    scores = exact_match(model, maker, lambda text: len(tokenizer.encode(text).ids), num_tasks, seed=7)
    for name, score in scores.items():
        print(f"{name:10} {100 * score:5.1f} %")


if __name__ == "__main__":
    main()
