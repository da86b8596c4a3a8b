"""First values of the token embeddings: the letters of a word, the digits and the size of a number.

A random start makes the model find out from examples that " 41" follows " 40" and that " otter" begins with an "o".
Both are known beforehand, so they are put in; training moves the vectors freely afterwards.
"""

import math

import torch
from torch import Tensor

_SPACE = "Ġ"
_STD = 0.03  # of one element, as in the plain start
_PERIODS = (5, 10, 20, 50, 100, 200, 1000, 2000)


def feature_embeddings(tokens: list[str], hidden_size: int, seed: int = 0) -> Tensor:
    """Return embeddings (num_tokens, hidden_size) of tokens in the order of their ids."""
    generator = torch.Generator().manual_seed(seed)
    directions: dict[str, Tensor] = {}

    def direction(name: str) -> Tensor:
        if name not in directions:
            directions[name] = torch.randn(hidden_size, generator=generator)
        return directions[name]

    rows = []
    for token in tokens:
        vector = torch.zeros(hidden_size)
        for name, weight in _features(token):
            vector += weight * direction(name)
        rows.append(vector / vector.square().mean().sqrt() * _STD)
    return torch.stack(rows)


def _features(token: str) -> list[tuple[str, float]]:
    bare = token.removeprefix(_SPACE)
    spaced = [("space", 0.4)] if bare != token and bare else []
    if bare.isascii() and bare.isdigit() and len(bare) <= 3:
        return spaced + _number_features(int(bare))
    if bare.isascii() and bare.isalpha():
        return spaced + _word_features(bare)
    return [*spaced, (f"token {bare or token}", 1.0)]


def _word_features(word: str) -> list[tuple[str, float]]:
    if len(word) == 1:
        return [(f"token {word}", 1.0)]
    features = [(f"token {word.lower()}", 0.8), (f"length {len(word)}", 0.25)]
    for index, letter in enumerate(word.lower()):
        features.append((f"letter {index} {letter}", 0.4))
        features.append((f"letter {index - len(word)} {letter}", 0.25))
    return features + ([("capital", 0.4)] if word[0].isupper() else [])


def _number_features(number: int) -> list[tuple[str, float]]:
    features = [(f"number {number}", 0.7), ("number", 0.5), ("size", number / 500 - 1)]
    features += [(f"digit {place} {number // place % 10}", 0.4) for place in (1, 10, 100)]
    for period in _PERIODS:
        angle = 2 * math.pi * number / period
        features += [(f"cos {period}", 0.35 * math.cos(angle)), (f"sin {period}", 0.35 * math.sin(angle))]
    return features
