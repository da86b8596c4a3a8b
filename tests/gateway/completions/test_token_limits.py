"""Allowed tokens, bad words, log-probabilities of the prompt, tokens named by their ids."""

from typing import Any

from tests.gateway.support import EOS, error_of, gateway, saying, tokenizer, tokens_of
from tests.support.marks import each


async def test_allowed_tokens_reach_the_request_each_once() -> None:
    async with gateway() as served:
        await served.chat(allowed_token_ids=[9, 7, 9])
        await served.complete(allowed_token_ids=[])
        first, second = (request.sampling for request in served.backend.submitted)
    assert (first.allowed_token_ids, second.allowed_token_ids) == ((9, 7), ())


async def test_bad_words_are_forbidden_at_the_beginning_and_behind_a_space() -> None:
    async with gateway() as served:
        await served.chat(bad_words=["dog", " dog", "lazy fox"])
        words = served.backend.submitted[0].sampling.bad_words
    assert words == tuple(tokens_of(text) for text in ("dog", " dog", "lazy fox", " lazy fox"))


@each(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": "7"}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2, "max_tokens": 4}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "dog"}, "bad_words"),
        ({"bad_words": ["dog"] * 257}, "bad_words"),
        ({"bad_words": [f"{number} " + "x y " * 50 for number in range(256)]}, "bad_words"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
async def test_wrong_limits_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with gateway() as served:
        assert error_of(await served.complete(**fields), 400)["param"] == param


def _entry(token_id: int, logprob: float, rank: int) -> dict[str, dict[str, Any]]:
    return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer().token_text(token_id)}}


async def test_prompt_logprobs_of_completions_are_of_each_choice() -> None:
    async with gateway() as served:
        answer = (await served.complete(prompt="the quick fox", prompt_logprobs=2, max_tokens=0, n=2)).json()
    _, quick, fox = tokens_of("the quick fox")
    expected = [
        None,
        _entry(quick, -0.5, 1) | _entry(quick + 1, -1.0, 2),
        _entry(fox, -0.5, 1) | _entry(fox + 1, -1.0, 2),
    ]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected, expected]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices() -> None:
    async with gateway() as served:
        answer = (await served.chat(prompt_logprobs=0, return_token_ids=True)).json()
    shown = answer["prompt_logprobs"]
    assert shown[0] is None
    assert [list(entry) for entry in shown[1:]] == [[str(token_id)] for token_id in answer["prompt_token_ids"][1:]]


async def test_an_echo_shows_as_many_likely_tokens_as_logprobs_asks_for() -> None:
    async with gateway() as served:
        answer = (await served.complete(prompt="the quick", echo=True, logprobs=1, prompt_logprobs=5)).json()
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1
    assert len(choice["prompt_logprobs"][1]) == 5


async def test_tokens_named_by_their_ids() -> None:
    (dog,) = tokens_of(" dog")
    async with gateway(saying(" dog")) as served:
        completion = (await served.complete(prompt="a", echo=True, logprobs=1, return_tokens_as_token_ids=True)).json()
        chat = (await served.chat(logprobs=True, return_tokens_as_token_ids=True)).json()
    (a,) = tokens_of("a")
    assert completion["choices"][0]["logprobs"]["tokens"] == [f"token_id:{a}", f"token_id:{dog}"]
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{dog}"
    assert bytes(chat["choices"][0]["logprobs"]["content"][0]["bytes"]) == b" dog"
