"""Train the pocket model on two CPU cores within a given time; may be stopped and started again.

    OMP_NUM_THREADS=2 nice -n 19 python scripts/pocket/train.py RUN_FOLDER --minutes 95

RUN_FOLDER gets `weights.safetensors`, `state.safetensors` with `state.json` (to resume from) and `log.jsonl` (loss,
speed, exact match per skill).
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conversations import ConversationMaker
from embeddings import feature_embeddings
from evaluation import exact_match
from pocket_model import PocketModel, PocketShape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from alignedserve.pocket.tasks import Skill

_TOKENIZER = Path(__file__).parents[2] / "alignedserve" / "pocket" / "model" / "tokenizer.json"
TOKENS_PER_STEP = 8192
BUCKETS = (128, 256, 512, 1024, 2048)
# Share of the steps per bucket, at the start and from half of the time on: short first, some long rows always.
EARLY_SHARES = (0.55, 0.18, 0.12, 0.08, 0.07)
LATE_SHARES = (0.26, 0.18, 0.18, 0.18, 0.20)
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARMUP, DECAY_START = 0.01, 0.4  # shares of the time; from there on linearly to 0
NUM_EVAL_TASKS = 32
BASE_WEIGHTS = {Skill.IDENTITY: 0.3, Skill.REFUSAL: 0.7, Skill.SUMS: 1.5, Skill.SORTING: 1.3}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of equal length, padded at the end."""

    tokens: Tensor  # (rows, length)
    weights: Tensor  # (rows, length), of predicting this very token


def make_batch(maker: ConversationMaker, length: int) -> Batch:
    """Make the rows of one step, all of `length` tokens."""
    rows = [maker.make_row(length) for _ in range(TOKENS_PER_STEP // length)]
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        tokens[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        weights[index, : len(row.weights)] = torch.tensor(row.weights)
    return Batch(tokens, weights)


def answer_loss(model: PocketModel, batch: Batch) -> Tensor:
    """Return the weighted mean of the loss on the answer tokens."""
    weights = batch.weights[:, 1:]
    asked = weights > 0
    hidden = model(batch.tokens)[:, :-1][asked]
    losses = functional.cross_entropy(model.logits(hidden), batch.tokens[:, 1:][asked], reduction="none")
    return (losses * weights[asked]).sum() / weights[asked].sum()


def pick_length(progress: float, rng: random.Random) -> int:
    """Return draw the row length of a step; long rows become more common until half of the time is spent."""
    late = min(1.0, 2 * progress)
    shares = [(1 - late) * early + late * end for early, end in zip(EARLY_SHARES, LATE_SHARES, strict=True)]
    return rng.choices(BUCKETS, shares)[0]


def rate_factor(progress: float) -> float:
    """Return the share of the full learning rate: a short rise, a plateau, a line down to 0."""
    if progress < WARMUP:
        return progress / WARMUP
    return max(0.0, min(1.0, (1 - progress) / (1 - DECAY_START)))


def make_mixture(scores: dict[str, float]) -> dict[Skill, float]:
    """Make the mixture of skills: lagging skills are practised more; a finished one keeps a quarter of its share."""
    return {skill: BASE_WEIGHTS.get(skill, 1.0) * (1.0 - 0.75 * scores.get(skill.value, 0.0)) for skill in Skill}


def make_optimizers(model: PocketModel) -> list[torch.optim.Optimizer]:
    """Make optimizers: Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the tensors of all optimizers by name: number of the optimizer, of the parameter, and what it is."""
    return {
        f"{number}.{parameter}.{name}": tensor.contiguous()
        for number, optimizer in enumerate(optimizers)
        for parameter, tensors in optimizer.state_dict()["state"].items()
        for name, tensor in tensors.items()
    }


def load_optimizers(optimizers: list[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]) -> None:
    """Put the tensors of `optimizer_tensors` back into optimizers made the same way."""
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            of_optimizer, parameter, name = key.split(".")
            if int(of_optimizer) == number:
                state.setdefault(int(parameter), {})[name] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class Training:
    """One run: the model, its optimizers, the time spent so far, and the files it leaves."""

    def __init__(self, folder: Path, minutes: float, eval_minutes: float) -> None:
        tokenizer = Tokenizer.from_file(str(_TOKENIZER))
        vocab_size = tokenizer.get_vocab_size()
        self.folder, self.total_s, self.eval_s = folder, minutes * 60, eval_minutes * 60
        self.model = PocketModel(PocketShape(vocab_size))
        names = [tokenizer.id_to_token(index) or "" for index in range(vocab_size)]
        self.model.model.embed_tokens.weight.data.copy_(feature_embeddings(names, self.model.shape.hidden_size))
        self.optimizers = make_optimizers(self.model)
        self.spent_s, self.num_steps = 0.0, 0
        self.scores: dict[str, float] = {}
        self._resume()
        # A resumed run must not see the rows of its first part again.
        self.maker = ConversationMaker(tokenizer, seed=1 + self.num_steps)
        self.maker.mixture = make_mixture(self.scores)
        self.rng = random.Random(1 + self.num_steps)
        self.count_tokens = lambda text: len(tokenizer.encode(text).ids)

    def _resume(self) -> None:
        state_file = self.folder / "state.json"
        if not state_file.exists():
            return
        state = json.loads(state_file.read_text(encoding="utf-8"))
        self.model.load_state_dict(load_file(self.folder / "weights.safetensors"))
        load_optimizers(self.optimizers, load_file(self.folder / "state.safetensors"))
        self.spent_s, self.num_steps, self.scores = state["spent_s"], state["num_steps"], state["scores"]

    def _save(self) -> None:
        state = {"spent_s": self.spent_s, "num_steps": self.num_steps, "scores": self.scores}
        # Written aside and renamed, so that a stop in between leaves the older files whole.
        save_file(dict(self.model.state_dict()), self.folder / "weights.part")
        save_file(optimizer_tensors(self.optimizers), self.folder / "optimizers.part")
        (self.folder / "state.part").write_text(json.dumps(state), encoding="utf-8")
        (self.folder / "weights.part").rename(self.folder / "weights.safetensors")
        (self.folder / "optimizers.part").rename(self.folder / "state.safetensors")
        (self.folder / "state.part").rename(self.folder / "state.json")

    def _log(self, **values: Any) -> None:
        line = json.dumps({"minutes": round(self.spent_s / 60, 2), "step": self.num_steps, **values})
        print(line, flush=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def step(self) -> float:
        """Learn from one batch and give its loss."""
        progress = self.spent_s / self.total_s
        for optimizer, rate in zip(self.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_factor(progress)
        batch = make_batch(self.maker, pick_length(progress, self.rng))
        with torch.autocast("cpu", torch.bfloat16):
            loss = answer_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        return float(loss.detach())

    def evaluate(self, num_tasks: int) -> None:
        """Test fresh tasks and practise from now on what lags."""
        self.scores = exact_match(self.model, self.maker, self.count_tokens, num_tasks, seed=10**6 + self.num_steps)
        self.maker.mixture = make_mixture(self.scores)
        self._log(exact_match={name: round(score, 2) for name, score in self.scores.items()})

    def run(self) -> None:
        """Train until the time is spent; the last evaluation is a larger one."""
        next_eval_s, losses = self.spent_s + self.eval_s, []
        while self.spent_s < self.total_s:
            began_s = time.monotonic()
            losses.append(self.step())
            if self.num_steps % 20 == 0:
                self._log(loss=round(sum(losses) / len(losses), 4))
                losses = []
            if self.spent_s >= next_eval_s:
                self.evaluate(NUM_EVAL_TASKS)
                self._save()
                next_eval_s += self.eval_s
            self.spent_s += time.monotonic() - began_s
        self.evaluate(4 * NUM_EVAL_TASKS)
        self._save()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=95)
    parser.add_argument("--eval-minutes", type=float, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    Training(options.folder, options.minutes, options.eval_minutes).run()


if __name__ == "__main__":
    main()
