"""Bodies of message batches, cut into their requests however they arrive."""

import json
import random
from typing import Any

import pytest

from alignedserve.api.anthropic.request_splitter import RequestSplitter
from alignedserve.core.errors import InvalidRequest
from tests.support.marks import each

_TEXTS = 'a"\\{}[],: \n\u2028é'


def drawn(random: random.Random, depth: int = 0) -> Any:
    kind = random.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return "".join(random.choice(_TEXTS) for _ in range(random.randrange(9)))
    if kind < 4:
        return random.choice([None, True, 1.5, -3])
    if kind == 4:
        return [drawn(random, depth + 1) for _ in range(random.randrange(4))]
    return {f'{number}"\\': drawn(random, depth + 1) for number in range(random.randrange(4))}


def split(body: bytes, pieces: random.Random, max_bytes: int = 1 << 20) -> tuple[list[bytes], list[str]]:
    splitter, requests = RequestSplitter(max_bytes), list[bytes]()
    while body:
        size = pieces.choice((1, 2, 5, 40, 1000))
        requests += splitter.push(body[:size])
        body = body[size:]
    splitter.finish()
    return requests, splitter.others


def test_any_body_is_cut_into_its_requests() -> None:
    for seed in range(400):
        draws = random.Random(seed)
        requests = [{"a": drawn(draws)} for _ in range(draws.randrange(5))]
        members = {"x]": drawn(draws), "requests": requests, "y": drawn(draws)}
        body = json.dumps(members, indent=draws.choice((None, 1)), ensure_ascii=draws.choice((False, True)))
        found, others = split(body.encode(), draws)
        assert [json.loads(one) for one in found] == requests
        assert others == [name for name in ("x]", "y") if members[name] is not None]


@each(
    "body",
    [
        b"",
        b"[]",
        b'{"requests":[{}]',
        b'{"requests":[{}',
        b'{"requests":[{}],}',
        b'{"requests":[{} {}]}',
        b'{"requests":{}}',
        b'{"requests":[]} x',
        b'{"requests" []}',
        b'{"other":nul}',
        b"{1:2}",
        b'{"requests":[{"a":"' + b"x" * 200 + b'"}]}',
    ],
)
def test_what_is_no_such_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        split(body, random.Random(1), max_bytes=100)
