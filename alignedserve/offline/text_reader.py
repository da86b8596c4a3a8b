"""Vectors and scores of texts from Python, by the prompts that the gateway makes."""

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

from alignedserve.api.embeddings.request_builder import check_dimensions, limit_of, prompt_named
from alignedserve.api.embeddings.response_format import Vectors, computed_scores, cosines, unit_vectors
from alignedserve.api.errors import GenerationFailed
from alignedserve.api.openai.prompt_encoding import param_at
from alignedserve.core.errors import AlignedServeError, ContextTooLong, InvalidRequest, ModelError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.offline.answers import RequestOutput
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.text.tokenizer import EncodedPair, Tokenizer

OnError = Literal["raise", "return"]
logger = logging.getLogger(__name__)


class PromptErrors:
    """The errors of single prompts of a call: raised, or kept while further prompts are answered."""

    def __init__(self, count: int, on_error: OnError = "raise") -> None:
        """`count`: the call's prompts; a single prompt needs no name. Raises InvalidRequest."""
        if on_error not in ("raise", "return"):
            raise InvalidRequest("errors must be 'raise' or 'return'.", param="errors")
        self.by_index: dict[int, AlignedServeError] = {}
        self.count = count
        self._is_raised = on_error == "raise"

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Keep an error within, or let it name the prompt, as `prompts[3]`."""
        try:
            yield
        except AlignedServeError as error:
            if not self._is_raised:
                self.by_index[index] = error
                return
            if self.count > 1 and isinstance(error, InvalidRequest):
                error.args = (f"{param_at('prompts', index, of=self.count)}: {error}",)
            raise

    def fail(self, reasons: Mapping[int, str]) -> None:
        """Keep why computing has failed, or raise ModelError; there may be no reasons."""
        if reasons and self._is_raised:
            first = min(reasons)
            which = f" (prompts[{first}])" if self.count > 1 else ""
            raise ModelError(f"{len(reasons)} of {self.count} prompts failed: {reasons[first]}{which}")
        self.by_index |= {index: ModelError(reason) for index, reason in reasons.items()}


_EMBEDDING = SamplingParams(temperature=0.0, max_tokens=0, wants_embedding=True)  # nothing is drawn

Prompt = TypeVar("Prompt")
Compute = Callable[[Mapping[int, Request], PromptErrors], dict[int, RequestOutput]]


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`, with the meaning that /v1/embeddings gives them."""

    prompt_name: str | None
    dimensions: int | None
    truncate_prompt_tokens: int | None


def listed(prompts: str | Iterable[Prompt]) -> Sequence[str | Prompt]:
    if not isinstance(prompts, Iterable):
        raise InvalidRequest("must be a text, or several.", param="prompts")
    return [prompts] if isinstance(prompts, str) else [*prompts]


def encoded_prompts(
    prompts: Sequence[str | Sequence[int]], tokenizer: Tokenizer, errors: PromptErrors
) -> dict[int, list[int]]:
    """Return the token ids of every prompt that is one."""
    encoded: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        with errors.of(index):
            encoded[index] = prompt_token_ids(prompt, tokenizer)
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
    vector_width: int
    root: bytes  # as Request.prefix_root

    def embed(self, texts: Sequence[str], options: EmbedOptions, compute: Compute, errors: PromptErrors) -> Vectors:
        """Return the vectors; those of texts with errors are NaN."""
        if self._is_cross_encoder:
            raise InvalidRequest("This model scores pairs of texts and has no vectors; use score.", param="texts")
        dimensions = options.get("dimensions")
        check_dimensions(dimensions, self.encoder)
        prompts = self._texts(texts, options.get("prompt_name"), options.get("truncate_prompt_tokens"), errors)
        vectors = np.full((len(texts), dimensions or self.vector_width), np.nan, np.float32)
        for index, embedding in self._computed(prompts, compute, errors).items():
            with errors.of(index):
                vectors[index] = unit_vectors([embedding], dimensions)[0]
        return vectors

    def score(
        self, first: Sequence[str], second: Sequence[str], truncate_to: int | None, compute: Compute, on_error: OnError
    ) -> list[float]:
        if len(first) not in (1, len(second)):
            raise InvalidRequest("text_1 must be one text, or as many as text_2 has.", param="text_1")
        errors = PromptErrors(1, on_error)  # places in a list of both sides would say nothing
        pairs = [(min(index, len(first) - 1), index) for index in range(len(second))]
        if self._is_cross_encoder:
            texts = [(first[left], second[right]) for left, right in pairs]
            computed = self._computed(self._pairs(texts, truncate_to, errors), compute, errors)
            scores = {index: computed_scores([score])[0] for index, score in computed.items()}
        else:
            prompts = self._texts([*first, *second], None, truncate_to, errors)
            vectors, num_first = self._computed(prompts, compute, errors), len(first)
            whole = [pair for pair in pairs if vectors.keys() >= {pair[0], num_first + pair[1]}]
            scores = {right: cosines([vectors[left], vectors[num_first + right]], 1)[0] for left, right in whole}
        for error in [*errors.by_index.values()][:1]:
            logger.warning("%d of %d pairs have no score: %s", len(second) - len(scores), len(second), error)
        return [scores.get(index, math.nan) for index in range(len(second))]

    @property
    def _is_cross_encoder(self) -> bool:
        return self.encoder is not None and self.encoder.score is not None

    def _texts(
        self, texts: Sequence[str], prompt_name: str | None, truncate_to: int | None, errors: PromptErrors
    ) -> dict[int, EncodedPair]:
        prompt = prompt_named(self.encoder.embedding if self.encoder is not None else None, prompt_name)
        limit = self._limit(texts, truncate_to)
        encoded: dict[int, EncodedPair] = {}
        for index, text in enumerate(texts):
            with errors.of(index):
                _check_text(text)
                token_ids = self.tokenizer.encode(prompt + text)
                if limit is not None and len(token_ids) > limit:
                    token_ids = self.tokenizer.encode_beginning(prompt + text, limit)
                encoded[index] = self._checked(EncodedPair(token_ids, 0))
        return encoded

    def _pairs(
        self, pairs: Sequence[tuple[str, str]], truncate_to: int | None, errors: PromptErrors
    ) -> dict[int, EncodedPair]:
        limit = self._limit(pairs, truncate_to)
        encoded: dict[int, EncodedPair] = {}
        for index, pair in enumerate(pairs):
            with errors.of(index):
                for text in pair:
                    _check_text(text)
                encoded[index] = self._checked(self.tokenizer.encode_pair(*pair, max_tokens=limit))
        return encoded

    def _limit(self, texts: Sequence[object], truncate_to: int | None) -> int | None:
        if not texts:
            raise InvalidRequest("There must be a text.", param="texts")
        return None if truncate_to is None else limit_of(truncate_to, self.max_context_len)

    def _checked(self, encoded: EncodedPair) -> EncodedPair:
        length = len(encoded.token_ids)
        if length > self.max_context_len:
            raise ContextTooLong(f"a text has {length} tokens, the model's context {self.max_context_len}")
        return encoded

    def _computed(self, prompts: Mapping[int, EncodedPair], compute: Compute, errors: PromptErrors) -> dict[int, bytes]:
        computed: dict[int, bytes] = {}
        requests = {index: self._request(prompt) for index, prompt in prompts.items()}
        for index, output in compute(requests, errors).items():
            with errors.of(index):
                if not output.embedding:
                    raise GenerationFailed("The model gave no usable numbers, or a text needs more than memory_bytes.")
                computed[index] = output.embedding
        return computed

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


def _check_text(text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequest("A text must be a string, not empty.", param="texts")
