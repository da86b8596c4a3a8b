"""States in blocks of their own, beside states in each block: python -m benchmarks.memory.states.

First the memory of a context in both forms, from configurations alone. Then conversations that take turns on one
worker, which serves a small hybrid of random weights in the same memory in both forms: what each finds in its cache.
The answers of both must be the same.
"""

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.config.sections import DecodeWorkerConfig, ModelSectionConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.events import PeerConnected, Received, SendTo
from alignedserve.messages.gateways import TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.workers import PrefillRequest, WorkerRegistered
from alignedserve.prefix_cache.block_hashes import prefix_root
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from decode_worker.colocated.logic import ColocatedCommand
from decode_worker.factory import make_colocated_logic, memory_of

_GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
    "max_position_embeddings": 131072,
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
}
_SMALL: dict[str, Any] = {
    **_GRANITE,
    "vocab_size": 512,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "layer_types": ["mamba"] * 3 + ["attention"] + ["mamba"] * 3 + ["attention"],
    "mamba_n_heads": 16,
    "mamba_d_state": 120,
    "num_local_experts": 0,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}
MODELS = {
    "Granite 4 H (36 layers of Mamba-2, 4 of attention)": _GRANITE,
    "Qwen3-Next (36 of the delta rule, 12)": _QWEN,
}
FORMS = {"in each block": False, "apart": True}


class Talk(NamedTuple):
    """Conversations that take turns."""

    num_conversations: int
    num_turns: int
    opening_len: int
    turn_len: int
    answer_len: int
    memory_bytes: int


class Found(NamedTuple):
    """What one form did."""

    num_prompt_tokens: int
    num_cached: int
    answers: list[tuple[int, ...]]


def resolved(folder: Path, fields: dict[str, Any], dtype: str, *, apart: bool) -> ServedModel:
    """Return a model of random weights in one of the forms."""
    (folder / "config.json").write_text(json.dumps(fields))
    return resolve_model(ModelSectionConfig(path=str(folder), random_weights=True, dtype=dtype), states_apart=apart)


def print_memory(num_tokens: int) -> None:
    """Print the memory of a context in both forms."""
    print(
        f"| a context of {num_tokens} tokens, bfloat16 | states are | block | states | in all | for its next turn too |"
    )
    print("|---|---|---|---|---|---|")
    for name, fields in MODELS.items():
        for form, apart in FORMS.items():
            with tempfile.TemporaryDirectory() as folder:
                served = resolved(Path(folder), fields, "bfloat16", apart=apart)
            layout = served.block_layout(served.default_block_size)
            whole = layout.blocks_for(num_tokens) * layout.block_bytes
            states = layout.context_bytes or layout.blocks_for(num_tokens) * (layout.block_bytes - layout.kv_bytes)
            sizes = [f"{size / 1e6:.0f} MB" for size in (states, whole, whole + layout.context_bytes)]
            print(f"| {name} | {form} | {layout.block_size} tokens | {' | '.join(sizes)} |")


class Worker:
    """A colocated worker in this process."""

    def __init__(self, served: ServedModel, memory_bytes: int) -> None:
        self._executor = ModelExecutor(served, EngineSizes(memory_bytes, 16, served.default_block_size))
        self.layout, num_blocks = self._executor.layout, self._executor.num_blocks
        registered = WorkerRegistered(
            num_blocks=num_blocks,
            block_size=self.layout.block_size,
            max_running_requests=16,
            pool_name="",
            can_prefill=True,
            can_decode=True,
        )
        config = DecodeWorkerConfig(max_running_requests=16, swap_space_bytes=0)
        self._logic = make_colocated_logic(
            registered=registered,
            memory=memory_of(config, self.layout, num_blocks=num_blocks),
            config=config,
            scheduling=SchedulingConfig(policy="fcfs"),
            eos_token_ids=frozenset(),
            prefix_cache=PrefixCacheConfig(),
            has_states=self.layout.state_bytes > 0,
        )
        self.num_cached = self.num_computed = self.most_running = 0
        self._perform(self._logic.on_event(PeerConnected(Role.ROUTER, "router"), 0.0))

    def answer(self, name: str, tokens: list[int], num_tokens: int) -> tuple[int, ...]:
        """Return the answer to a prompt."""
        return self.answers({name: tokens}, num_tokens)[name]

    def answers(self, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> dict[str, tuple[int, ...]]:
        """Return the answers to prompts that come together."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        root, commands = prefix_root(b"", tenant="", salt="", form=b""), list[ColocatedCommand]()
        for name, tokens in prompts.items():
            request = Request(RequestId(name), tuple(tokens), sampling, "", 0.0, prefix_root=root)
            commands += self._logic.on_event(Received("router", PrefillRequest(request, 1)), 0.0)
        found = self._perform(commands)
        return {name: tuple(found[RequestId(name)]) for name in prompts}

    def close(self) -> None:
        """End its threads."""
        self._executor.close()

    def _perform(self, commands: list[ColocatedCommand]) -> Mapping[RequestId, list[int]]:
        pending, answers = list(commands), defaultdict[RequestId, list[int]](list)
        while pending:
            command = pending.pop(0)
            if isinstance(command, RunIteration):
                self.num_computed += sum(count for _, count in command.slices)
                self.most_running = max(self.most_running, len(command.slices))
                pending += self._logic.on_event(self._executor.run_iteration(command), 0.0)
            elif isinstance(command, SendTo) and isinstance(command.message, TokensEmitted):
                for delta in command.message.deltas:
                    answers[delta.request_id] += delta.token_ids
                    self.num_cached += delta.num_cached_tokens
        return answers


def talk_in_turns(worker: Worker, talk: Talk) -> Found:
    """Let conversations take turns; each turn has all before it."""
    rng = random.Random(0)
    known = [[rng.randrange(3, 500) for _ in range(talk.opening_len)] for _ in range(talk.num_conversations)]
    num_prompt_tokens, answers = 0, list[tuple[int, ...]]()
    for turn in range(talk.num_turns):
        for number, tokens in enumerate(known):
            tokens += [rng.randrange(3, 500) for _ in range(talk.turn_len)]
            num_prompt_tokens += len(tokens)
            answer = worker.answer(f"{number}-{turn}", tokens, talk.answer_len)
            answers.append(answer)
            tokens += answer
    return Found(num_prompt_tokens, worker.num_cached, answers)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="of the context in the first table")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory-mib", type=int, default=40, help="of the worker in the second")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_memory(arguments.tokens)
    talk = Talk(arguments.conversations, arguments.turns, 300, 60, 12, arguments.memory_mib << 20)
    conversations = f"{talk.num_conversations} conversations of {talk.num_turns} turns"
    print(f"\n| {conversations} in {arguments.memory_mib} MiB | found |\n|---|---|")
    found = {}
    for form, apart in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            worker = Worker(resolved(Path(folder), _SMALL, "float32", apart=apart), talk.memory_bytes)
        found[form] = talk_in_turns(worker, talk)
        worker.close()
    for form, one in found.items():
        share = one.num_cached / one.num_prompt_tokens
        print(f"| states {form} | {share:.0%} of {one.num_prompt_tokens} tokens |", flush=True)
    one, other = found.values()
    print(f"\nThe same answers: {one.answers == other.answers}")


if __name__ == "__main__":
    main()
