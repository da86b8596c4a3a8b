"""Agreement of products in a GGUF file's blocks with its weights unpacked to float32: greedy answers to 40 prompts.

    python -m benchmarks.precision.gguf_agreement [FILE.gguf, otherwise SmolLM2 where it is installed]
        [--types Q8_0 Q4_0 Q4_1 Q4_K Q6_K] [--transformers]

With --types, all matrices of the file are first written again in each of these types, from its values as they are.
The reference answers are this engine's from the unpacked float32 weights of that type; with --transformers they are
also compared with transformers' from the same file. For each form: the share of reference tokens that it would choose
too after the same tokens, and the share of tokens before its own answer, running freely, first differs. What is
recorded of types that are not asked for is kept.
"""

import argparse
import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.evaluation.questions import make_questions
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.model.built_in import smollm2_file
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.gguf.source import GgufSource
from alignedserve.runtime.model.weight_loader import assemble_weights
from alignedserve.text.chat_prompt import ChatPrompt
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.precision.quantization import logits_of
from benchmarks.support.greedy import greedy_answers
from benchmarks.support.recording import RESULTS, write_result
from benchmarks.support.requantized import write_requantized

NAME = "gguf_agreement"
IN_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
NUM_PROMPTS = 40
MAX_TOKENS = 64
FORMS = (
    ("bfloat16", torch.bfloat16, True),
    ("blocks, float32", torch.float32, False),
    ("blocks, bfloat16", torch.bfloat16, False),
)


class Agreement(NamedTuple):
    """Shares of the reference's tokens."""

    same_choice: float  # after the same tokens
    same_before_difference: float
    same_answers: float  # of answers, whole


def load(file: GgufFile, dtype: torch.dtype, *, unpacks_all: bool) -> Decoder:
    """Load the model, with products in blocks or without."""
    config = gguf_config(file)
    source = GgufSource(file, config, dtype, torch.device("cpu"), unpacks_all=unpacks_all)
    return Decoder(config, assemble_weights(config, source, packed=source))


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the prompts as chats, spread over the groups of questions."""
    questions = make_questions()
    chosen = [questions[place * len(questions) // NUM_PROMPTS] for place in range(NUM_PROMPTS)]
    now = datetime.now().astimezone()
    return [
        tokenizer.encode_chat(ChatPrompt([{"role": "user", "content": question.prompt}]), now=now)
        for question in chosen
    ]


def agreement(decoder: Decoder, prompts: list[list[int]], expected: list[list[int]], ends: set[int]) -> Agreement:
    """Compare one form with the reference's answers."""
    num_same = num_before = num_whole = 0
    for prompt, answer, own in zip(prompts, expected, greedy_answers(decoder, prompts, MAX_TOKENS, ends), strict=True):
        logits = logits_of(decoder, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        num_same += int((logits.argmax(-1) == torch.tensor(answer)).sum())
        pairs = enumerate(zip(answer, own, strict=False))
        num_before += next((place for place, (one, other) in pairs if one != other), min(len(answer), len(own)))
        num_whole += own == answer
    total = sum(map(len, expected))
    return Agreement(num_same / total, num_before / total, num_whole / len(prompts))


def transformers_share(path: Path, prompts: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of reference tokens that transformers would choose too, from the file unpacked by itself."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    reading: Any = modeling_gguf_pytorch_utils
    config: Any = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    auto_model: Any = transformers.AutoModelForCausalLM
    model = auto_model.from_config(config, dtype=torch.float32)
    tensors = reading.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    num_same = 0
    for prompt, answer in zip(prompts, expected, strict=True):
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        num_same += int((logits.argmax(-1) == torch.tensor(answer)).sum())
    return num_same / sum(map(len, expected))


def measured(path: Path, *, with_transformers: bool) -> dict[str, Any]:
    """Compare all forms of one file."""
    file, tokenizer = GgufFile(path), Tokenizer.load(path)
    prompts, ends = prompts_of(tokenizer), set(gguf_config(file).eos_token_ids)
    expected = greedy_answers(load(file, torch.float32, unpacks_all=True), prompts, MAX_TOKENS, ends)
    figures: dict[str, Any] = {"tokens": sum(map(len, expected))}
    if with_transformers:
        figures["transformers"] = transformers_share(path, prompts, expected)
    for name, dtype, unpacks_all in FORMS:
        found = agreement(load(file, dtype, unpacks_all=unpacks_all), prompts, expected, ends)
        figures[name] = {key: round(value, 4) for key, value in found._asdict().items()}
        print(name, figures[name], flush=True)
    return figures


def recorded() -> dict[str, Any]:
    """Return the figures of earlier runs."""
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--types", nargs="+", default=[], choices=IN_BLOCKS)
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    path: Path = options.file or smollm2_file()
    if not options.types:
        figures = measured(path, with_transformers=options.transformers)
        write_result(NAME, {**recorded(), path.name: figures})
    for type_name in options.types:
        print(type_name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / f"{type_name}.gguf"
            write_requantized(GgufFile(path), written, type_name)
            figures = measured(written, with_transformers=options.transformers)
        write_result(NAME, {**recorded(), f"{path.stem} as {type_name}": figures})


if __name__ == "__main__":
    main()
