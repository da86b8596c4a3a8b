"""Constraints on answers: each field becomes a grammar that workers decode under, or a 400 that names it."""

import json
import random
from typing import Any, Literal

import httpx
from llguidance import LLMatcher
from pydantic import BaseModel

from alignedserve.api.errors import GrammarFailed
from alignedserve.core.request import Request
from alignedserve.runtime.grammar.compiler import PARSER_LIMITS
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from tests.gateway.support import EOS, Gateway, chunks_of, error_of, gateway, tokenizer
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each
from tests.support.random_answers import is_valid

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


def following(request: Request) -> Script:
    """Return a random answer under the request's grammar, as a model that knows nothing would give."""
    vocabulary = grammar_vocabulary(tokenizer(), vocab_size=tokenizer().vocab_size, eos_token_ids=[EOS])
    matcher = LLMatcher(vocabulary, request.sampling.grammar, limits=PARSER_LIMITS)
    rng = random.Random(request.sampling.seed)
    tokens: list[int] = []
    while not matcher.is_stopped() and len(tokens) < 200:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(tokenizer().vocab_size) if mask[token // 8] >> (token % 8) & 1]
        closing = [token for token in allowed if token == EOS or tokenizer().token_bytes(token) in (b'"', b"}", b"]")]
        tokens.append(rng.choice(closing if closing and len(tokens) > 30 else allowed))
        matcher.consume_token(tokens[-1])
    return Script((*tokens, EOS) if tokens[-1] != EOS else tuple(tokens))


async def answer(served: Gateway, **fields: Any) -> str:
    response = await served.chat(**fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@each(
    "fields",
    [
        {"response_format": JSON_SCHEMA},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "trip", "schema": SCHEMA, "strict": False},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
async def test_a_schema_by_any_of_its_names(fields: dict[str, Any]) -> None:
    async with gateway(following) as served:
        answers = [await answer(served, seed=seed, max_tokens=200, **fields) for seed in range(5)]
    assert all(is_valid(SCHEMA, text) for text in answers)


@each(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"choice": ["north", "south"]}}, ("north", "south")),
        ({"guided_choice": ["a", "ab"]}, ("a", "ab")),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, ("aa", "ab", "ba", "bb")),
        ({"guided_regex": "^x|y$"}, ("x", "y")),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, ("yes", "no")),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
    ],
)
async def test_choices_patterns_and_grammars(fields: dict[str, Any], expected: tuple[str, ...]) -> None:
    async with gateway(following) as served:
        assert await answer(served, **fields) in expected
        text = (await served.complete(max_tokens=20, **fields)).json()["choices"][0]["text"]
    assert text in expected


@each("fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}])
async def test_any_object(fields: dict[str, Any]) -> None:
    async with gateway() as served:
        await served.chat(**fields, seed=1)
        (request,) = served.backend.submitted
    assert isinstance(json.loads("".join(_text(following(request)))), dict)


async def test_no_constraint_is_no_grammar() -> None:
    async with gateway() as served:
        await served.chat(response_format={"type": "text"}, structured_outputs=None, guided_json=None)
        assert [request.sampling.grammar for request in served.backend.submitted] == [""]


async def test_white_space_is_bounded_and_may_be_forbidden() -> None:
    async with gateway(following) as served:
        compact = await answer(served, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}, seed=1)
        spaced = await answer(served, guided_json=SCHEMA, guided_whitespace_pattern="~", seed=1)
    assert compact == json.dumps(json.loads(compact), ensure_ascii=False, separators=(",", ":"))
    assert is_valid(SCHEMA, spaced.replace("~", ""))


async def test_it_composes_with_choices_streams_log_probabilities_and_stops() -> None:
    async with gateway(following) as served:
        fields: dict[str, Any] = {
            "n": 3,
            "stream": True,
            "logprobs": True,
            "stop": "\u2603",
            "presence_penalty": 1.0,
            "max_tokens": 200,
            "seed": 1,
        }
        chunks = chunks_of(await served.chat(response_format=JSON_SCHEMA, **fields))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert all(is_valid(SCHEMA, text) for text in texts)
    assert len(set(texts)) == 3


class Trip(BaseModel):
    """A trip somewhere."""

    city: str
    means: Literal["train", "ship"]
    nights: list[int]


async def test_the_sdk_parses_into_a_pydantic_model() -> None:
    import openai

    async with gateway(following) as served:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=_client(served))
        completion = await client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "a trip"}], response_format=Trip, seed=4
        )
    assert isinstance(completion.choices[0].message.parsed, Trip)


@each(
    ("fields", "param"),
    [
        ({"guided_grammar": 'root ::= s\ns ::= s s | "a"'}, "guided_grammar"),
        ({"response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
    ],
)
async def test_an_answer_that_its_grammar_ends_names_the_field(fields: dict[str, Any], param: str) -> None:
    failing = Script((5, 6), failure=GrammarFailed("the grammar takes more than 4 s of computing for one answer"))
    async with gateway(lambda _: failing) as served:
        error = error_of(await served.chat(**fields), 400)
        streamed = (await served.chat(**fields, stream=True)).text
    assert error["param"] == param
    assert error["message"].startswith(f"Invalid value for {param}: the grammar takes")
    assert f"Invalid value for {param}: the grammar takes" in streamed


@each(
    ("fields", "param", "named"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text"),
        ({"response_format": {**JSON_SCHEMA, "type": "json_object"}}, "response_format.json_schema", "only with it"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "'not'",
        ),
        ({"response_format": JSON_SCHEMA, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "'triggers'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "structures"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format", "1 to 128"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "xml"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regular expression"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "whitespace"),
        ({"guided_choice": []}, "guided_choice", "choices"),
        ({"guided_choice": [""]}, "guided_choice", "none empty"),
        ({"guided_grammar": "start: ???"}, "guided_grammar", "followed"),
        ({"guided_grammar": "root ::= (("}, "guided_grammar", "GBNF"),
        ({"guided_grammar": "start: <|nothing|>"}, "guided_grammar", "a token"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        (
            {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
            "guided_json",
            "finite",
        ),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "finite"),
        ({"guided_json": False}, "guided_json", "finite"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "finite"),
        ({"guided_json": {"properties": {f"p{n}": {} for n in range(900)}}}, "guided_json", "'properties'"),
        ({"guided_json": {"enum": list(range(2000))}}, "guided_json", "'enum'"),
        ({"guided_json": {"title": "x" * 300_000}}, "guided_json", "larger"),
        ({"guided_json": {"minLength": 10**9}}, "guided_json", "'minLength'"),
    ],
)
async def test_bad_constraints_are_refused_by_name(fields: dict[str, Any], param: str, named: str) -> None:
    async with gateway() as served:
        for response in (await served.chat(**fields), await served.complete(**fields)):
            error = error_of(response, 400)
            assert error["param"] == param
            assert named in error["message"]
        assert served.backend.submitted == []


def _exponential() -> dict[str, Any]:
    twice = {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(10)]} for i in range(10)]}
    return {"structured_outputs": {"json": twice}}


@each(
    "fields",
    [
        _exponential(),
        {"guided_regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"guided_grammar": 'start: x{1000000}\nx: "a"'},
    ],
)
async def test_hostile_constraints_are_refused_or_harmless(fields: dict[str, Any]) -> None:
    async with gateway() as served:
        response = await served.chat(**fields)
    assert response.status_code in (200, 400)


def _text(script: Script) -> list[str]:
    return [tokenizer().decode(list(script.token_ids))]


def _client(served: Gateway) -> Any:
    return httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://localhost")
