"""Random answers under a grammar, chosen like a model's that knows nothing; and the validator that judges them."""

import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from typing import Any, NamedTuple
from uuid import UUID

import jsonschema  # type: ignore[import-untyped]
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, validators
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark

from alignedserve.runtime.grammar.compiler import PARSER_LIMITS

_EOS = 256
_PRINTABLE = frozenset(range(32, 127))


class _Bytes:
    """A vocabulary of single bytes: every text can be written in one way only."""

    def __init__(self) -> None:
        self.eos_token_id = _EOS
        self.bos_token_id = None
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
        self.special_token_ids = [_EOS]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Walk(NamedTuple):
    """One answer, whole or cut off."""

    answer: bytes
    has_ended: bool


@cache
def byte_vocabulary() -> LLTokenizer:
    """Return the vocabulary of single bytes and an end."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matcher_of(grammar: str) -> LLMatcher:
    """Return a matcher of single bytes, in error if the grammar is refused."""
    return LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=PARSER_LIMITS)


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Return whether this text is a whole answer."""
    fresh, raw = matcher.deep_copy(), text.encode("utf-8", "surrogatepass")
    return bool(fresh.try_consume_tokens(list(raw)) == len(raw) and fresh.is_accepting())


def random_walk(matcher: LLMatcher, seed: int, max_bytes: int = 400) -> Walk:
    """Return a random answer; half of its bytes are printable ones, and after a while it is brought to its end."""
    fresh, rng, answer = matcher.deep_copy(), random.Random(seed), b""
    for place in range(max_bytes):
        allowed = _allowed(fresh)
        assert allowed, f"no token may follow {answer!r}"
        token = rng.choice(_preferred(allowed, place, rng))
        fresh.consume_token(token)
        answer += bytes([token]) if token != _EOS else b""
        if fresh.is_stopped():
            return Walk(answer, has_ended=True)
    return Walk(answer, has_ended=False)


def _allowed(matcher: LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    return [token for token in range(_EOS + 1) if mask[token // 8] >> (token % 8) & 1]


def _preferred(allowed: list[int], place: int, rng: random.Random) -> list[int]:
    if place > 40:
        closing = [_EOS] if _EOS in allowed else [token for token in allowed if token in b'"}]']
        if closing:
            return closing
    printable = [token for token in allowed if token in _PRINTABLE or token == _EOS]
    return printable if printable and rng.random() < 0.5 else allowed


def is_valid(schema: Any, answer: bytes | str, draft: type = Draft202012Validator) -> bool:
    """Return whether the answer is JSON that the schema allows.

    Exact where jsonschema is not: decimal numbers, classes of patterns in ASCII, formats that it needs packages for.
    """
    value = json.loads(answer, parse_float=_number)
    schema = json.loads(json.dumps(schema), parse_float=_number)  # a Decimal equals no float but a whole one
    return bool(_EXACT[draft](schema, format_checker=_FORMATS).is_valid(value))


def _number(text: str) -> Decimal | float:
    return float(text) if "e" in text.lower() else Decimal(text)  # exponents may be too large for a Decimal


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not re.search(regex_to_lark(pattern, "dw"), instance):
        yield jsonschema.ValidationError("does not match the pattern")


def _multiple_of(validator: Any, divisor: float, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    is_number = isinstance(instance, int | Decimal) and not isinstance(instance, bool)
    if is_number and (Fraction(instance) / Fraction(str(divisor))).denominator != 1:
        yield jsonschema.ValidationError("is not a multiple")


def _is_hostname(text: str) -> bool:
    labels = text.split(".")
    is_label = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?").fullmatch
    return len(text) <= 253 and all(is_label(label) and label[2:4] != "--" for label in labels)


def _is_email(text: str) -> bool:
    local, _, host = text.rpartition("@")
    atoms = local.split(".")
    return (
        0 < len(local) <= 64
        and all(re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+", atom) for atom in atoms)
        and _is_hostname(host)
    )


def _is_date_time(text: str) -> bool:
    return text[10] == "T" and datetime.fromisoformat(text).tzinfo is not None


def _is_duration(text: str) -> bool:
    part = r"(?=[0-9T])([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T(?=[0-9])([0-9]+H)?([0-9]+M)?([0-9]+S)?)?"
    return re.fullmatch(f"P({part}|[0-9]+W)", text) is not None


_CHECKS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "date-time": _is_date_time,
    "duration": _is_duration,
    "email": _is_email,
    "hostname": _is_hostname,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "time": lambda text: time.fromisoformat(text).tzinfo is not None,
    "uri": lambda text: re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text) is not None,
    "uuid": UUID,
}
_FORMATS = FormatChecker(formats=())
for _name, _check in _CHECKS.items():
    _FORMATS.checks(_name, raises=(ValueError, IndexError))(
        lambda text, check=_check: not isinstance(text, str) or check(text) is not False
    )
_OURS = {"pattern": _pattern, "multipleOf": _multiple_of}
_EXACT = {draft: validators.extend(draft, _OURS) for draft in (Draft7Validator, Draft202012Validator)}
