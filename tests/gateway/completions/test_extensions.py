"""Fields by the names of other open servers: what the text shows, token ids, the ends of prompts."""

from pathlib import Path
from typing import Any

from alignedserve.api.models.model_services import ModelCard
from tests.gateway import tool_support
from tests.gateway.support import (
    EOS,
    chunks_of,
    error_of,
    gateway,
    saying,
    tokenizer,
    tokens_of,
    write_sentencepiece,
)
from tests.gateway.tool_support import THINKING, model_with
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each

USER = {"role": "user", "content": "hello"}
SPECIAL = 2  # <|system|>


@each("is_streamed", [False, True])
async def test_a_stop_string_may_be_shown(is_streamed: bool) -> None:
    async with gateway(saying("the quick brown fox")) as served:
        fields: dict[str, Any] = {"stop": "brown", "include_stop_str_in_output": True}
        if is_streamed:
            chunks = chunks_of(await served.complete(stream=True, **fields))
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        else:
            (choice,) = (await served.complete(**fields)).json()["choices"]
            text = choice["text"]
    assert text == "the quick brown"


async def test_special_tokens_may_be_shown() -> None:
    script = Script((*tokens_of("the"), SPECIAL, *tokens_of("fox"), EOS))
    shown: dict[str, Any] = {"skip_special_tokens": False}
    async with gateway(lambda _: script) as served:
        answers = [
            await served.complete(),
            await served.complete(**shown),
            await served.complete(**shown, include_stop_str_in_output=True),
        ]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == ["thefox", "the<|system|>fox", "the<|system|>fox<|end|>"]


async def test_token_ids_of_completions() -> None:
    tokens = [*tokens_of("the quick"), EOS]
    async with gateway(saying("the quick")) as served:
        (whole,) = (await served.complete(return_token_ids=True)).json()["choices"]
        chunks = chunks_of(await served.complete(return_token_ids=True, stream=True))
        plain = (await served.complete()).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert whole["token_ids"] == [one for choice in choices for one in choice["token_ids"]] == tokens
    assert whole["prompt_token_ids"] == choices[0]["prompt_token_ids"] == list(tokens_of("hello world"))
    assert plain.keys().isdisjoint({"token_ids", "prompt_token_ids"})


async def test_token_ids_of_chats() -> None:
    tokens = [*tokens_of("the quick"), EOS]
    async with gateway(saying("the quick")) as served:
        whole = (await served.chat(return_token_ids=True)).json()
        chunks = chunks_of(await served.chat(return_token_ids=True, stream=True))
        (request, *_) = served.backend.submitted
    assert whole["choices"][0]["token_ids"] == tokens
    assert [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])] == tokens
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == list(request.prompt_token_ids)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "the quick"


@each("text", ["the quick", "<think>so</think>the quick"])
@each("fields", [{}, {"stop": "quick"}, {"max_tokens": 2}])
async def test_token_ids_have_a_log_probability_each(text: str, fields: dict[str, Any]) -> None:
    asked = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True} | fields
    model = model_with(THINKING)
    async with gateway(tool_support.saying(model, text), model=model) as served:
        (whole,) = (await served.chat(**asked)).json()["choices"]
        chunks = chunks_of(await served.chat(**asked, stream=True))
        completion = await served.complete(**asked | {"logprobs": 0})
    streamed = [chunk["choices"][0] for chunk in chunks]
    names = [f"token_id:{token_id}" for token_id in whole["token_ids"]]
    assert [one["token"] for one in whole["logprobs"]["content"]] == names
    assert [one["token"] for choice in streamed for one in (choice["logprobs"] or {}).get("content", ())] == names
    assert [one for choice in streamed for one in choice.get("token_ids", ())] == whole["token_ids"]
    (choice,) = completion.json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert len(choice["logprobs"]["text_offset"]) == len(choice["token_ids"])


@each(("num_tokens", "num_read"), [(1, 1), (-1, 251), (999, 300)])
async def test_prompts_may_be_truncated(num_tokens: int, num_read: int) -> None:
    prompt = list(range(5, 305))
    async with gateway() as served:
        answer = await served.complete(prompt=prompt, truncate_prompt_tokens=num_tokens, max_tokens=5)
        if num_read < 252:
            assert answer.json()["usage"]["prompt_tokens"] == num_read
            assert served.backend.submitted[0].prompt_token_ids == tuple(prompt[-num_read:])
        else:
            error_of(answer, 400)


async def test_a_last_message_may_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "the <|end|> quick"}]
    async with gateway() as served:
        await served.chat(messages=messages, continue_final_message=True)
        await served.chat(messages=messages, add_generation_prompt=False)
        continued, ended = [
            tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)
            for request in served.backend.submitted
        ]
        both = await served.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
        empty = await served.chat(messages=[USER, {"role": "assistant", "content": ""}], continue_final_message=True)
    assert continued.endswith("<|assistant|>the <|end|> quick")
    assert ended.endswith("<|assistant|>the <|end|> quick<|end|>\n")
    assert error_of(both, 400)["param"] == "add_generation_prompt"
    assert error_of(empty, 400)["param"] == "continue_final_message"


async def test_words_of_sentencepiece_keep_their_space_where_a_text_goes_on(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)
    model = ModelCard("tiny", tmp_path, 256, (2,), created=1)
    loaded = model.load_tokenizer()
    script = Script((*loaded.encode("the quick dog", add_special_tokens=False)[1:], 2))
    messages = [USER, {"role": "assistant", "content": "the"}]
    async with gateway(lambda _: script, model=model) as served:
        plain = (await served.complete(prompt="the")).json()["choices"][0]
        scored = (await served.complete(prompt="the", logprobs=0)).json()["choices"][0]
        echoed = (await served.complete(prompt="the", echo=True)).json()["choices"][0]
        continued = (await served.chat(messages=messages, continue_final_message=True)).json()["choices"][0]
        fresh = (await served.chat(messages=messages[:1])).json()["choices"][0]
    assert (plain["text"], scored["text"], echoed["text"]) == (" quick dog", " quick dog", "the quick dog")
    assert scored["logprobs"]["text_offset"] == [0, 6]
    assert (continued["message"]["content"], fresh["message"]["content"]) == (" quick dog", "quick dog")


async def test_the_name_of_a_participant_is_the_templates_to_show() -> None:
    async with gateway() as served:
        assert (await served.chat(messages=[USER | {"name": "bob"}])).status_code == 200
        error = error_of(await served.chat(messages=[USER | {"name": "b" * 65}]), 400)
    assert error["param"] == "messages[0].name"
