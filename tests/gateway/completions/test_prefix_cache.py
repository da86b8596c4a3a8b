"""The prefix cache as clients of the gateway see it: salts, tenants, cached tokens."""

import json
from typing import Any

from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.batch_worker.lines import ClusterLineRunner
from alignedserve.batches.interfaces import LineRequest
from alignedserve.batches.records import Endpoint
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.prefixes import MAX_BLOCK_NAMES, split_names
from tests.gateway.batches.batch_server import listening
from tests.gateway.support import Gateway, chunks_of, error_of, gateway, saying
from tests.support.marks import each

HASHER = PrefixHasher(b"k" * 32, form=b"form", block_size=4)
KEYS = ("mine", "yours")


async def root_of(served: Gateway, key: str = "mine", **fields: Any) -> bytes:
    answer = await served.chat(headers={"authorization": f"Bearer {key}"}, **fields)
    assert answer.status_code == 200, answer.text
    return served.backend.submitted[-1].prefix_root


async def test_a_key_and_a_salt_make_the_root() -> None:
    async with gateway(api_keys=KEYS, prefix_hasher=HASHER) as served:
        mine = await root_of(served)
        assert len(mine) == 16
        assert await root_of(served, stream=True, cache_salt=None) == mine
        yours, salted = await root_of(served, "yours"), await root_of(served, cache_salt="a")
        assert len({mine, yours, salted, await root_of(served, "yours", cache_salt="a")}) == 4
        assert await root_of(served, cache_salt="a") == salted
        completion = await served.complete(headers={"authorization": "Bearer mine"}, n=2)
        assert completion.status_code == 200
        assert {request.prefix_root for request in served.backend.submitted[-2:]} == {mine}


async def test_keys_share_where_that_is_configured() -> None:
    shared = PrefixHasher(b"k" * 32, form=b"form", block_size=4, is_shared_between_keys=True)
    async with gateway(api_keys=KEYS, prefix_hasher=shared) as served:
        assert await root_of(served) == await root_of(served, "yours")
        assert await root_of(served) != await root_of(served, cache_salt="a")


async def test_nothing_is_shared_where_the_cache_is_off() -> None:
    async with gateway() as served:
        assert await root_of(served, cache_salt="a") == b""


async def test_another_cluster_or_model_has_other_roots() -> None:
    others = [PrefixHasher(b"l" * 32, form=b"form", block_size=4), PrefixHasher(b"k" * 32, form=b"f", block_size=4)]
    assert len({one.root("anyone", None) for one in (HASHER, *others)}) == 3


async def test_a_line_of_a_batch_has_the_root_of_its_owner() -> None:
    async with gateway(api_keys=KEYS, prefix_hasher=HASHER) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        line = LineRequest(Endpoint.CHAT, "r", body, served.services.keys.ring.owners[1])
        assert (await ClusterLineRunner(served.services).run(line)).status_code == 200
        assert served.backend.submitted[-1].prefix_root == await root_of(served, "yours")


@each("salt", ["", "s" * 257, "s" * (1 << 20), 1, ["a"]])
async def test_bad_salts_are_refused_and_not_repeated(salt: Any) -> None:
    async with gateway(prefix_hasher=HASHER) as served:
        for answer in (await served.chat(cache_salt=salt), await served.complete(cache_salt=salt)):
            error = error_of(answer, 400)
            assert error["param"] == "cache_salt"
            assert len(error["message"]) < 200


def cached(num_cached_tokens: int) -> Any:
    return saying("hello world", num_cached_tokens=num_cached_tokens)


async def test_cached_tokens_are_told() -> None:
    async with gateway(cached(4), prefix_hasher=HASHER) as served:
        usage = (await served.chat()).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
        assert usage["prompt_tokens"] > 4
        chunks = chunks_of(await served.chat(stream=True, stream_options={"include_usage": True}))
        assert chunks[-1]["usage"] == usage
        # Two prompts of three choices each: every prompt counts once, and so do its cached tokens.
        both = (await served.complete(prompt=["the quick brown fox jumps", "hello how are you today"], n=3)).json()
        assert both["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 < both["usage"]["prompt_tokens"]
        text = (await served.client.get("/metrics")).text
    queried, hit = (
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"))
    )
    assert (queried, hit) == (2 * usage["prompt_tokens"] + 3 * both["usage"]["prompt_tokens"], 2 * 4 + 6 * 4)


async def test_a_batch_line_tells_its_cached_tokens() -> None:
    async with gateway(cached(3), prefix_hasher=HASHER) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        response = await ClusterLineRunner(served.services).run(LineRequest(Endpoint.CHAT, "r", body, "anyone"))
    assert response.cached_tokens == 3
    assert json.loads(response.body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_openais_sdk_reads_them() -> None:
    import openai

    async with (
        gateway(cached(4), prefix_hasher=HASHER) as served,
        listening(served.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], extra_body={"cache_salt": "a"}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_block_names_are_of_full_blocks_and_bounded() -> None:
    root = HASHER.root("anyone", None)

    def names(num_tokens: int, generated: tuple[int, ...] = ()) -> list[bytes]:
        prompt = tuple(range(num_tokens))
        request = Request(RequestId("r"), prompt, SamplingParams(), "g", 0.0, prefix_root=root)
        return list(split_names(HASHER.block_names(request, generated)))

    assert len(names(3)) == 0
    assert len(names(9)) == 2
    assert names(9, (9, 10, 11)) == names(12) == names(14)
    assert names(12)[:2] == names(9)
    assert len(names(4 * MAX_BLOCK_NAMES + 8)) == MAX_BLOCK_NAMES
    bare = Request(RequestId("r"), tuple(range(8)), SamplingParams(), "g", 0.0)
    assert HASHER.block_names(bare) == b""
