"""Effect of 8-bit weights on the pocket model: the tasks of `alignedserve eval`, and the logits of the right answers.

    python -m benchmarks.precision.quantization [tasks per skill and context length]

Everything is greedy and runs in this process. Logits are compared at every token of prompt and answer, float32 against
int8: relative error (norm of the difference over the norm), share of tokens where the likeliest is the same, and the
mean Kullback-Leibler divergence.
"""

import statistics
import sys
from datetime import datetime
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.evaluation.accuracy import EvalAnswer, EvalItem, EvalReport, make_items, score
from alignedserve.evaluation.pocket_calls import task_call
from alignedserve.loadgen.prompts import load_tokenizer
from alignedserve.offline.llm import LLM
from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.steps.step_batch import BatchBuilder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.text.chat_prompt import ChatPrompt
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.support.recording import write_result

QUANTIZATIONS = (None, "int8")
BLOCK_SIZE = 16
DEFAULT_TASKS = 50
NUM_LOGIT_TASKS = 200


class LogitDistance(NamedTuple):
    """Distance of logits on one text."""

    relative_error: float
    same_likeliest: float
    divergence: float


def evaluate(quantization: str | None, items: list[EvalItem], kv_cache_dtype: str = "auto") -> EvalReport:
    """Answer every task."""
    count_tokens = load_tokenizer(pocket_folder())
    llm = LLM("pocket", quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    answers = []
    for item in items:
        max_tokens = task_call(item.task, "pocket", count_tokens).body["max_tokens"]
        (output,) = llm.chat([item.task.prompt], SamplingParams(temperature=0.0, max_tokens=max_tokens))
        answers.append(EvalAnswer(item, output.text))
    llm.close()
    return score(answers)


def load(quantization: str | None) -> Decoder:
    """Return the pocket model in float32."""
    config = read_model_config(pocket_folder())
    return Decoder(config, load_weights(pocket_folder(), config, torch.float32, quantization=quantization))


def logits_of(decoder: Decoder, token_ids: list[int], cache_dtype: str | None = None) -> Tensor:
    """Return logits [tokens, vocab_size] of one text, computed in one pass."""
    num_blocks = blocks_for(len(token_ids), BLOCK_SIZE)
    storage = BlockStorage(decoder.config.block_layout(BLOCK_SIZE, cache_dtype or decoder.dtype_name), num_blocks)
    table = SequenceTable(max_sequences=1, max_context_len=len(token_ids), block_size=BLOCK_SIZE)
    builder = BatchBuilder(table, storage, attention_planner(AUTO, table, storage, decoder.config, decoder.dtype))
    blocks = tuple(BlockId(block) for block in range(num_blocks))
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    table.add(NewSequence(RequestId("text"), tuple(token_ids), len(token_ids), 0, blocks, greedy))
    step = builder.build([RequestId("text")], [len(token_ids)])
    return decoder.logits(decoder.forward(step.forward_batch(decoder.device), storage)).float()


def distance(exact: Tensor, rounded: Tensor) -> LogitDistance:
    """Return the distance of logits, both [tokens, vocab_size]."""
    logprobs = exact.log_softmax(-1)
    return LogitDistance(
        relative_error=float((rounded - exact).norm() / exact.norm()),
        same_likeliest=float((rounded.argmax(-1) == exact.argmax(-1)).float().mean()),
        divergence=float(functional.kl_div(rounded.log_softmax(-1), logprobs, log_target=True, reduction="batchmean")),
    )


@torch.inference_mode()
def compare_logits(items: list[EvalItem]) -> dict[str, float]:
    """Return means over the texts."""
    tokenizer = Tokenizer.load(pocket_folder())
    now = datetime.now().astimezone()
    exact, rounded = load(None), load("int8")
    distances = []
    for item in items:
        prompt = tokenizer.encode_chat(ChatPrompt([{"role": "user", "content": item.task.prompt}]), now=now)
        token_ids = [*prompt, *tokenizer.encode(item.task.answer, add_special_tokens=False)]
        distances.append(distance(logits_of(exact, token_ids), logits_of(rounded, token_ids)))
    columns = zip(*distances, strict=True)
    return dict(zip(LogitDistance._fields, (statistics.mean(column) for column in columns), strict=True))


def table_of(report: EvalReport) -> dict[str, float]:
    """Return the share of right answers by skill and by context length."""
    return {group.name: group.accuracy for group in (*report.skills, *report.contexts)}


def main() -> None:
    """Measure, print, record."""
    num_tasks = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_TASKS
    items = make_items(num_tasks, 0, load_tokenizer(pocket_folder()))
    step = max(1, len(items) // NUM_LOGIT_TASKS)
    figures: dict[str, Any] = {"tasks": num_tasks, "logits": compare_logits(items[::step])}
    print(figures, flush=True)
    for quantization in QUANTIZATIONS:
        figures[quantization or "float32"] = table_of(evaluate(quantization, items))
        print(quantization or "float32", figures[quantization or "float32"], flush=True)
    write_result("quantization", figures)


if __name__ == "__main__":
    main()
