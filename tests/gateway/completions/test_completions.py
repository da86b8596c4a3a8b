"""Completions: every form of prompt, echo, log-probabilities, streams."""

from typing import Any

from tests.gateway.support import EOS, chunks_of, error_of, gateway, saying, tokenizer, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each


async def test_the_bytes_of_a_stream() -> None:
    async with gateway(saying("the dog")) as served:
        response = await served.complete(stream=True)
    first = chunks_of(response)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},'
        '"model":"tiny","service_tier":"default","choices":[{"index":0,"text":'
    )
    ends = ['"the","logprobs":null,"finish_reason":null', '" dog","logprobs":null,"finish_reason":null']
    ends += ['"","logprobs":null,"finish_reason":"stop"']
    expected = "".join(f"{head}{end}}}]}}\n\n" for end in ends) + "data: [DONE]\n\n"
    assert response.content == expected.encode()


@each(
    ("prompt", "num_prompts"),
    [
        ("hello", 1),
        (["hello", "world"], 2),
        ([40, 41, 42], 1),
        ([[40], [41, 42], [43]], 3),
    ],
)
async def test_forms_of_a_prompt(prompt: Any, num_prompts: int) -> None:
    async with gateway() as served:
        answer = (await served.complete(prompt=prompt, n=2)).json()
        requests = served.backend.submitted
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    assert len(requests) == 2 * num_prompts
    prompt_lens = [request.prompt_len for request in requests[::2]]
    assert answer["usage"]["prompt_tokens"] == sum(prompt_lens)
    assert [request.sampling.max_tokens for request in requests] == [16] * len(requests)


async def test_an_empty_prompt_begins_a_document() -> None:
    async with gateway() as served:
        await served.complete(prompt="")
        assert served.backend.submitted[0].prompt_token_ids == (tokenizer().bos_token_id,)


async def test_echo_repeats_the_prompt() -> None:
    async with gateway(saying(" dog")) as served:
        whole = (await served.complete(prompt="the", echo=True)).json()
        chunks = chunks_of(await served.complete(prompt="the", echo=True, stream=True))
    assert whole["choices"][0]["text"] == "the dog"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the dog"


async def test_echo_of_nothing_but_the_prompt_needs_no_worker() -> None:
    async with gateway() as served:
        answer = (await served.complete(prompt=["the dog", "a fox"], echo=True, max_tokens=0)).json()
        assert served.backend.submitted == []
    assert [choice["text"] for choice in answer["choices"]] == ["the dog", "a fox"]
    assert answer["choices"][0]["finish_reason"] == "length"


@each("is_streamed", [False, True])
async def test_echo_with_logprobs(is_streamed: bool) -> None:
    async with gateway(saying(" over the lazy")) as served:
        response = await served.complete(prompt="the quick", echo=True, logprobs=1, max_tokens=2, stream=is_streamed)
    choices = [chunk["choices"][0] for chunk in chunks_of(response)] if is_streamed else response.json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    merged = {
        name: [entry for choice in choices for entry in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert text == "the quick over the"
    assert merged["tokens"] == ["the", " quick", " over", " the"]
    assert merged["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert merged["text_offset"] == [0, 3, 9, 14]
    assert merged["top_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in merged["top_logprobs"][1:])


@each(
    ("prompt", "text", "offsets"),
    [
        ("<|user|>the dog<|end|><|assistant|>", "<|user|>the dog<|end|><|assistant|>", [0, 8, 11, 15, 22]),
        ([3, *tokens_of("the dog"), EOS, 4], "the dog", [0, 0, 3, 7, 7]),
    ],
)
async def test_offsets_of_special_tokens_in_an_echo(prompt: Any, text: str, offsets: list[int]) -> None:
    async with gateway(saying(" over")) as served:
        answer = await served.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    choice = answer.json()["choices"][0]
    assert choice["text"] == f"{text} over"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]


async def test_scoring_a_prompt_without_generating() -> None:
    async with gateway() as served:
        answer = (await served.complete(prompt="the quick fox", echo=True, logprobs=0, max_tokens=0)).json()
        sampling = served.backend.submitted[0].sampling
    assert (sampling.max_tokens, sampling.num_prompt_logprobs) == (0, 0)
    assert answer["choices"][0]["text"] == "the quick fox"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(tokens_of("the quick fox"))
    assert answer["usage"]["completion_tokens"] == 0


async def test_offsets_without_echo_begin_at_the_text() -> None:
    async with gateway(saying("the dog")) as served:
        logprobs = (await served.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 3]
    assert logprobs["tokens"] == ["the", " dog"]
    assert all(len(top) >= 2 for top in logprobs["top_logprobs"])


async def test_a_token_that_ends_the_answer_is_not_shown() -> None:
    dog = tokens_of(" dog")[0]
    async with gateway(lambda _: Script((*tokens_of("the lazy"), dog))) as served:
        shown = (await served.complete(stop_token_ids=[dog], logprobs=0)).json()
        kept = (await served.complete(max_tokens=3)).json()
    assert shown["choices"][0]["text"] == "the lazy"
    assert shown["choices"][0]["logprobs"]["tokens"] == ["the", " lazy"]
    assert shown["usage"]["completion_tokens"] == 3
    assert kept["choices"][0]["text"] == "the lazy dog"


async def test_max_tokens_ends_with_length() -> None:
    async with gateway(saying("the quick brown fox jumps")) as served:
        choice = (await served.complete(max_tokens=2)).json()["choices"][0]
    assert choice["text"] == "the quick"
    assert choice["finish_reason"] == "length"


async def test_tokens_that_are_no_text_become_replacement_characters() -> None:
    half = tokens_of("€")[:1]
    async with gateway(lambda _: Script((*tokens_of("the"), *half, EOS))) as served:
        assert (await served.complete()).json()["choices"][0]["text"] == "the\ufffd"
        chunks = chunks_of(await served.complete(stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the\ufffd"


async def test_the_default_of_max_tokens_gives_way_to_the_context() -> None:
    async with gateway() as served:
        assert (await served.complete(prompt=[40] * 250)).status_code == 200
        assert served.backend.submitted[0].sampling.max_tokens == 6
        assert error_of(await served.complete(prompt=[40] * 256), 400)["code"] == "context_length_exceeded"
        assert error_of(await served.complete(prompt=[40] * 250, max_tokens=7), 400)["param"] == "prompt"
        refused = error_of(await served.complete(prompt=[[40], [40] * 250], max_tokens=7), 400)
        assert (refused["param"], "250 tokens in prompt[1]" in refused["message"]) == ("prompt[1]", True)


async def test_max_tokens_zero_without_echo_is_refused() -> None:
    async with gateway() as served:
        assert error_of(await served.complete(max_tokens=0), 400)["param"] == "max_tokens"
