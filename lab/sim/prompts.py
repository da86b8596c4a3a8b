"""Tokens of the simulated requests: texts that prompts share become tokens that they share."""

from collections.abc import Sequence
from itertools import chain, count, islice, repeat

from alignedserve.core.request import Request
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES, MAX_BLOCK_NAMES
from alignedserve.prefix_cache.block_hashes import BlockHasher, prefix_root
from lab.sim.engine import EOS, TOKEN, SimulatedAnswer
from lab.workload.requests import TimedRequest

_ROOT = prefix_root(b"simulated", tenant="", salt="", form=b"")


class SimulatedTexts:
    """Tokens of prompts and answers, and the names of their blocks. Every text has one token of its own, repeated."""

    def __init__(self, block_size: int | None) -> None:
        self._hasher = None if block_size is None else BlockHasher(block_size)
        self._next_token = count(max(EOS, TOKEN) + 1)
        self._token_of: dict[int | str, int] = {}
        self._plain: dict[int, tuple[int, ...]] = {}  # open prompts without texts, by length: one tuple for all of one
        self._num_users: dict[int, int] = {}

    def prompt(self, timed: TimedRequest) -> tuple[int, ...]:
        """Return the tokens of a request's prompt, which is given back when the request ends."""
        if not timed.runs:
            return self._borrow(timed.prompt_len)
        runs = chain.from_iterable(repeat(self._token(run.text), run.num_tokens) for run in timed.runs)
        tokens = tuple(runs)[: timed.prompt_len]
        num_own = timed.prompt_len - len(tokens)
        return tokens + (next(self._next_token),) * num_own if num_own else tokens

    def root(self, timed: TimedRequest) -> bytes:
        """Return the root of a request's blocks; empty for one without texts, which shares nothing."""
        return _ROOT if timed.runs and self._hasher is not None else b""

    def block_names(self, request: Request, generated_token_ids: Sequence[int] = ()) -> bytes:
        if self._hasher is None or not request.prefix_root:
            return b""
        blocks = self._hasher.named(request.prefix_root, (*request.prompt_token_ids, *generated_token_ids))
        return b"".join([block.block_hash[:BLOCK_NAME_BYTES] for block in islice(blocks, MAX_BLOCK_NAMES)])

    def answer(self, timed: TimedRequest) -> SimulatedAnswer:
        return SimulatedAnswer(timed.output_len, TOKEN if timed.answer is None else self._token(timed.answer))

    def give_back(self, timed: TimedRequest) -> None:
        length = timed.prompt_len
        if timed.runs:
            return
        self._num_users[length] -= 1
        if not self._num_users[length]:
            del self._plain[length], self._num_users[length]

    def _borrow(self, length: int) -> tuple[int, ...]:
        self._num_users[length] = self._num_users.get(length, 0) + 1
        prompt = self._plain.get(length)
        if prompt is None:
            prompt = self._plain[length] = (TOKEN,) * length
        return prompt

    def _token(self, text: int | str) -> int:
        token = self._token_of.get(text)
        if token is None:
            token = self._token_of[text] = next(self._next_token)
        return token
