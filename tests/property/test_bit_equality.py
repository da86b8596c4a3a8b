"""A request's tokens and log-probabilities are the same bit for bit whatever happens to it: other requests in its
batches, prompts in any chunks, preemption, swaps, blocks of another sequence or in reverse, another number of threads,
right and wrong drafts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken, SamplingParams, TokenLogprob
from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward import native_pass
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.drafts import Tokens
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.cpu.native import supported_levels
from tests.support.marks import many, slow
from tests.support.models.tiny_engines import random_tokens, tiny_decoder
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not supported_levels(), reason="plain PyTorch reduces in the order of its libraries"),
]

BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT_LEN = 16, 200, 600
# The longest prompt and its answer lie in two sections, whose sums are merged.
PROMPT_LENS = (1, 30, 75, 140, 505)
COMMON_LEN, NUM_GENERATED = 64, 10
NUM_TURNS = 30


class Form(NamedTuple):
    """What is computed."""

    family: str
    dtype: str
    weights: str | None = None
    cache: str | None = None


FORMS = (
    Form("llama", "float32"),
    Form("llama", "bfloat16"),
    Form("opt", "bfloat16", "int8"),
    Form("llama", "float32", "int8", "int8"),
    Form("llama", "bfloat16", None, "int8"),
    Form("gguf", "float32"),
    Form("gpt_oss", "float32"),
    Form("deepseek_v3", "bfloat16"),
    Form("gemma3n_text", "float32"),
    Form("gemma4_text", "bfloat16"),
)
SLOW_FORMS = (
    *FORMS,
    Form("gguf", "bfloat16", None, "int8"),
    Form("opt", "float32"),
    Form("mistral_window", "bfloat16"),
    Form("mistral_window", "float32", None, "int8"),
    Form("llama_mqa", "bfloat16"),
    Form("qwen3", "bfloat16"),
    Form("gpt_oss", "bfloat16", None, "int8"),
    Form("deepseek_v3", "float32", "int8", "int8"),
    Form("deepseek_v2", "float32"),
    Form("gemma2", "bfloat16"),
    Form("llama4_text", "bfloat16"),
    Form("gemma2", "float32", None, "int8"),
    Form("gemma3n_text", "bfloat16"),
    Form("gemma4_text", "float32", None, "int8"),
    Form("gemma4_experts", "float32"),
)


@dataclass(slots=True, eq=False)
class Request:
    """One request, wherever it is."""

    request_id: RequestId
    kind: int
    tokens: list[int]
    sampled: list[SampledToken] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    is_reversed: bool = False
    swapped: Tensor | None = None  # the content of its blocks
    num_computed: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.sampled) >= NUM_GENERATED


def decoder_of(form: Form, folder: Path) -> Decoder:
    path = folder / "weights.gguf"
    if form.family == "gguf":
        write_tiny_gguf(path, "llama", ("Q4_K", "Q6_K", "Q8_0"))
        return tiny_decoder(path, form.dtype)
    make_tiny_model(folder, form.family, max_position_embeddings=MAX_CONTEXT_LEN)
    return tiny_decoder(folder, form.dtype, form.weights)


def prompt_of(kind: int) -> list[int]:
    """Return a prompt; all begin alike."""
    count = PROMPT_LENS[kind]
    return (random_tokens(99, COMMON_LEN) + random_tokens(kind, count))[:count]


def sampling_of(kind: int) -> SamplingParams:
    return SamplingParams(temperature=float(kind % 2), seed=kind, max_tokens=40, ignore_eos=True, num_logprobs=3)


class Worker:
    """An engine, and what may happen to its requests."""

    def __init__(self, decoder: Decoder, form: Form, rng: random.Random, answers: Sequence[Sequence[int]] = ()) -> None:
        """`answers`: to each kind of prompt, which are drafted with mistakes; empty: nothing is drafted."""
        layout = decoder.config.block_layout(BLOCK_SIZE, form.cache or decoder.dtype_name)
        self._storage = BlockStorage(layout, NUM_BLOCKS)
        self._bytes = self._storage.bytes.view(NUM_BLOCKS, -1)
        self._bytes.fill_(0xFF)
        self._engine = Engine(
            model=decoder,
            storage=self._storage,
            options=EngineOptions(max_sequences=8, max_context_len=MAX_CONTEXT_LEN, attention=AUTO),
        )
        self._random = rng
        self._texts = [[*prompt_of(kind), *answer] for kind, answer in enumerate(answers)]
        self._engine._drafting.drafter = self._draft
        self.num_right = 0
        self._free = list(range(NUM_BLOCKS))
        rng.shuffle(self._free)
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    @property
    def may_draft(self) -> bool:
        return self._engine.may_draft

    def start(self, request: Request) -> None:
        """Start or resume with what `request` has, or with the blocks of another sequence that begins alike."""
        num_tokens = len(prompt_of(request.kind)) + NUM_GENERATED
        request.blocks = [self._free.pop() for _ in range(blocks_for(num_tokens, BLOCK_SIZE))]
        if request.swapped is not None:
            self._bytes[request.blocks[: len(request.swapped)]] = request.swapped
            request.swapped = None
        else:
            request.num_computed, request.is_reversed = self._copied_from_another(request), False
            request.is_reversed = not request.num_computed and self._random.random() < 0.3
        blocks = tuple(BlockId(block) for block in request.blocks)
        own = (request.request_id, tuple(request.tokens), len(prompt_of(request.kind)), request.num_computed, blocks)
        self._engine.add_sequence(NewSequence(*own, sampling_of(request.kind), is_reversed=request.is_reversed))
        self.running.append(request)

    def _copied_from_another(self, request: Request) -> int:
        """Copy full blocks of another running sequence; return their tokens."""
        others = [other for other in self.running if not other.is_reversed]
        if not others or self._random.random() < 0.3:
            return 0
        other = self._random.choice(others)
        common = 0
        for mine, theirs in zip(request.tokens[:-1], other.tokens, strict=False):
            if mine != theirs:
                break
            common += 1
        count = min(common, self._engine.num_computed(other.request_id)) // BLOCK_SIZE
        self._bytes[request.blocks[:count]] = self._bytes[other.blocks[:count]]
        return count * BLOCK_SIZE

    def leave(self, request: Request, *, keeps_cache: bool) -> None:
        """Take a request off the engine: its blocks' content stays with it, or is lost."""
        self.running.remove(request)
        request.num_computed = self._engine.num_computed(request.request_id)
        if keeps_cache and request.num_computed:
            count = blocks_for(request.num_computed, BLOCK_SIZE)
            request.swapped = self._bytes[request.blocks[:count]].clone()
        self._engine.remove_sequence(request.request_id)
        self._bytes[request.blocks] = 0xFF
        self._free += request.blocks
        self._random.shuffle(self._free)

    def iterate(self) -> None:
        """Compute one step over some of the sequences, the prompts in chunks."""
        self.compute(self.running)

    def compute(self, requests: Sequence[Request]) -> None:
        """Compute one step over some of these."""
        slices = []
        for request in requests:
            left = self._engine.num_tokens(request.request_id) - self._engine.num_computed(request.request_id)
            if self._random.random() < 0.8:
                slices.append((request.request_id, 1 if self._random.random() < 0.2 else self._random.randint(1, left)))
        if not slices:
            return
        drafts = {request_id: self._random.randint(0, 5) for request_id, _ in slices} if self._texts else {}
        output = self._engine.execute(slices, drafts=drafts)
        assert not output.failed, "logits that are not numbers"
        self.num_right += sum(num_right for _, _, num_right in output.drafted)
        by_id = {request.request_id: request for request in self.running}
        for token in output.sampled:
            request = by_id[token.request_id]
            request.sampled.append(token)
            request.tokens.append(token.token_id)
        for request in [request for request in self.running if request.is_done]:
            self.leave(request, keeps_cache=False)

    def _draft(self, tokens: Tokens, at_most: int) -> Tokens:
        known = tokens.tolist()
        following = [text[len(known) :] for text in self._texts if text[: len(known)] == known]
        mistakes = [token if self._random.random() < 0.8 else 7 for token in (following[0] if following else [])]
        return np.array(mistakes[:at_most], np.int64)


class StoppingWorker(Worker):
    """An engine whose passes stop between layers, for steps of other requests, some of which have just come."""

    def __init__(self, decoder: Decoder, form: Form, rng: random.Random) -> None:
        super().__init__(decoder, form, rng)
        self._computing: list[Request] | None = None  # by the pass that may stop
        self.num_stops = 0
        decoder.stop_for(self._between_layers)

    @override
    def iterate(self) -> None:
        self._computing = [request for request in self.running if self._random.random() < 0.6]
        self.compute(self._computing)
        self._computing = None

    def _between_layers(self) -> None:
        computing, self._computing = self._computing, None
        if computing is not None and self._random.random() < 0.5:
            if self.waiting and len(self.running) < 6:
                self.start(self.waiting.pop())
            self.num_stops += 1
            self.compute([request for request in self.running if request not in computing])
        self._computing = computing


def run_history(worker: Worker, rng: random.Random) -> list[Request]:
    """Start requests and disturb them, until all are done."""
    requests: list[Request] = []
    for turn in range(NUM_TURNS * 20):
        if turn < NUM_TURNS and rng.random() < 0.4:
            kind = rng.randrange(len(PROMPT_LENS))
            worker.waiting.append(Request(RequestId(f"r{len(requests)}"), kind, prompt_of(kind)))
            requests.append(worker.waiting[-1])
        if worker.waiting and len(worker.running) < 4:
            worker.start(worker.waiting.pop(rng.randrange(len(worker.waiting))))
        if worker.running and rng.random() < 0.2:
            request = rng.choice(worker.running)
            worker.leave(request, keeps_cache=rng.random() < 0.6)
            worker.waiting.append(request)
        worker.iterate()
        if turn >= NUM_TURNS and not worker.running and not worker.waiting:
            return requests
    raise AssertionError("requests do not end")


def generated(request: Request) -> list[tuple[int, TokenLogprob | None]]:
    return [(token.token_id, token.logprob) for token in request.sampled[:NUM_GENERATED]]


def alone(decoder: Decoder, form: Form, kind: int) -> list[tuple[int, TokenLogprob | None]]:
    """Return what a request generates by itself, its prompt at once, and one decode after another."""
    worker = Worker(decoder, form, _Steady(0))
    request = Request(RequestId("alone"), kind, prompt_of(kind))
    worker.start(request)
    while not request.is_done:
        worker.iterate()
    return generated(request)


class _Steady(random.Random):
    """Never skips nor disturbs, and takes whole prompts."""

    @override
    def random(self) -> float:
        return 0.75

    @override
    def randint(self, a: int, b: int) -> int:
        return b


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(decoder: Decoder, form: Form, seeds: range) -> None:
    torch.set_num_threads(1)
    expected = [alone(decoder, form, kind) for kind in range(len(PROMPT_LENS))]
    answers = [[token_id for token_id, _ in answer] for answer in expected]
    for seed in seeds:
        torch.set_num_threads(2 - seed % 2)
        rng = random.Random(seed)
        worker = Worker(decoder, form, rng, answers)
        for request in run_history(worker, rng):
            assert generated(request) == expected[request.kind], f"{form}, seed {seed}, {request.request_id}"
        assert worker.num_right or not worker.may_draft, f"{form}, seed {seed}: nothing was drafted"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_whatever_happens_every_bit_is_the_same(form: Form, tmp_path: Path) -> None:
    check(decoder_of(form, tmp_path), form, range(1, 2))


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_passes_that_stop_between_layers(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_pass, "_PART_S", 1e-9)  # after every layer
    decoder = decoder_of(form, tmp_path)
    expected = [alone(decoder, form, kind) for kind in range(len(PROMPT_LENS))]
    rng = random.Random(1)
    worker = StoppingWorker(decoder, form, rng)
    for request in run_history(worker, rng):
        assert generated(request) == expected[request.kind], f"{form}, {request.request_id}"
    assert worker.num_stops > 20


@pytest.mark.parametrize("form", slow(*SLOW_FORMS), ids=str)
def test_many_histories(form: Form, tmp_path: Path) -> None:
    check(decoder_of(form, tmp_path), form, range(many(40)))
