"""Vectors and scores of texts from Python, by the prompts that the gateway makes."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypedDict, TypeVar

from alignedserve.api.embeddings.request_builder import check_dimensions, limit_of, prompt_named
from alignedserve.api.embeddings.response_format import Vectors, computed_scores, cosines, unit_vectors
from alignedserve.api.errors import GenerationFailed
from alignedserve.api.openai.prompt_encoding import param_at
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.offline.answers import RequestOutput
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.text.tokenizer import EncodedPair, Tokenizer


@contextmanager
def naming(index: int, *, of: int) -> Iterator[None]:
    """Let an InvalidRequest within name the prompt that it is about, as `prompts[3]`; a single one needs no name."""
    try:
        yield
    except InvalidRequest as error:
        if of > 1:
            error.args = (f"{param_at('prompts', index, of=of)}: {error}",)
        raise


_EMBEDDING = SamplingParams(temperature=0.0, max_tokens=0, wants_embedding=True)  # nothing is drawn

Prompt = TypeVar("Prompt")
Compute = Callable[[Sequence[Request]], list[RequestOutput]]


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`, with the meaning that /v1/embeddings gives them."""

    prompt_name: str | None
    dimensions: int | None
    truncate_prompt_tokens: int | None


def listed(prompts: str | Sequence[Prompt]) -> Sequence[str | Prompt]:
    return [prompts] if isinstance(prompts, str) else prompts


def encoded_prompts(prompts: Iterable[str | Sequence[int]], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of every prompt. Raises InvalidRequest naming the one that is none."""
    encoded: list[list[int]] = []
    for prompt in (listed_prompts := [*prompts]):
        with naming(len(encoded), of=len(listed_prompts)):
            encoded.append(prompt_token_ids(prompt, tokenizer))
    return encoded


def prompt_token_ids(prompt: str | Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt that may be given as such. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)  # of which items are numbers
    token_ids = [token_id for token_id in prompt if type(token_id) is int] if is_list else []
    if not token_ids or len(token_ids) < len(prompt):
        raise InvalidRequest(
            "prompts is a list; each of its items is a text, or a list of token ids with at least one.", param="prompts"
        )
    last = tokenizer.vocab_size - 1
    if not 0 <= min(token_ids) <= max(token_ids) <= last:
        raise InvalidRequest(f"a prompt holds an id outside the vocabulary (0 to {last}).", param="prompts")
    return token_ids


class TextReader(NamedTuple):
    """Makes the requests of texts for one model, and reads what is computed of them."""

    tokenizer: Tokenizer
    max_context_len: int
    encoder: EncoderConfig | None  # None: the model is a decoder
    root: bytes  # as Request.prefix_root

    def embed(self, texts: Sequence[str], options: EmbedOptions, compute: Compute) -> Vectors:
        if self._is_cross_encoder:
            raise InvalidRequest("This model scores pairs of texts and has no vectors; use score.", param="texts")
        dimensions = options.get("dimensions")
        check_dimensions(dimensions, self.encoder)
        prompts = self._texts(texts, options.get("prompt_name"), options.get("truncate_prompt_tokens"))
        return unit_vectors(self._computed(prompts, compute), dimensions)

    def score(
        self, first: Sequence[str], second: Sequence[str], truncate_to: int | None, compute: Compute
    ) -> list[float]:
        if len(first) not in (1, len(second)):
            raise InvalidRequest("text_1 must be one text, or as many as text_2 has.", param="text_1")
        if not self._is_cross_encoder:
            return cosines(self._computed(self._texts([*first, *second], None, truncate_to), compute), len(second))
        firsts = first if len(first) > 1 else [*first] * len(second)
        return computed_scores(self._computed(self._pairs(firsts, second, truncate_to), compute))

    @property
    def _is_cross_encoder(self) -> bool:
        return self.encoder is not None and self.encoder.score is not None

    def _texts(self, texts: Sequence[str], prompt_name: str | None, truncate_to: int | None) -> list[EncodedPair]:
        prompt = prompt_named(self.encoder.embedding if self.encoder is not None else None, prompt_name)
        limit = self._limit(texts, truncate_to)
        encoded = [self.tokenizer.encode(prompt + text) for text in texts]
        for index, token_ids in enumerate(encoded):
            if limit is not None and len(token_ids) > limit:
                encoded[index] = self.tokenizer.encode_beginning(prompt + texts[index], limit)
        return self._checked([EncodedPair(token_ids, 0) for token_ids in encoded])

    def _pairs(self, first: Sequence[str], second: Sequence[str], truncate_to: int | None) -> list[EncodedPair]:
        limit = self._limit([*first, *second], truncate_to)
        pairs = zip(first, second, strict=True)
        return self._checked([self.tokenizer.encode_pair(*pair, max_tokens=limit) for pair in pairs])

    def _limit(self, texts: Sequence[str], truncate_to: int | None) -> int | None:
        if not texts or "" in texts:
            raise InvalidRequest("There must be a text, and none empty.", param="texts")
        return None if truncate_to is None else limit_of(truncate_to, self.max_context_len)

    def _checked(self, encoded: list[EncodedPair]) -> list[EncodedPair]:
        longest = max(len(pair.token_ids) for pair in encoded)
        if longest > self.max_context_len:
            raise ContextTooLong(f"a text has {longest} tokens, the model's context {self.max_context_len}")
        return encoded

    def _computed(self, prompts: Sequence[EncodedPair], compute: Compute) -> list[bytes]:
        outputs = compute([self._request(prompt) for prompt in prompts])
        if not all(output.embedding for output in outputs):
            raise GenerationFailed("The model gave no usable numbers, or a text needs more than memory_bytes.")
        return [output.embedding for output in outputs]

    def _request(self, prompt: EncodedPair) -> Request:
        return Request(
            RequestId(secrets.token_hex(8)),
            tuple(prompt.token_ids),
            _EMBEDDING,
            reply_to="",
            arrival_s=0.0,
            prefix_root=self.root,
            second_text_at=prompt.second_at,
        )
