"""Recordings without tokens of requests that share cached blocks replay, and tell nothing of the tokens."""

import dataclasses
import random
from array import array
from pathlib import Path

import pytest

from alignedserve.config.sections import RecordingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter, Request, SampledToken, SamplingParams
from alignedserve.messages.prefixes import PrefixFound
from alignedserve.messages.workers import PrefillRequest
from alignedserve.prefix_cache.block_hashes import BlockHasher, packed_blocks
from alignedserve.process.redaction import KeepDecisions, KeepLengths, Redactor, TokenChains
from lab.replay.component_replay import recordings_in
from tests.harnesses.clusters.cluster_shape import Shape
from tests.property.test_prefix_cache_histories import ROOTS, conversations
from tests.replay.recorded import RecordedCluster, replays
from tests.support.marks import each

SECRET, EOS = b"s" * 32, 2


def redactor() -> Redactor:
    return Redactor(KeepDecisions(frozenset({EOS}), SECRET))


def request(name: str, *prompt: int, root: bytes = ROOTS[0], stops: tuple[int, ...] = ()) -> Request:
    sampling = SamplingParams(max_tokens=8, stop_token_ids=stops)
    return Request(RequestId(name), prompt, sampling, "gateway", 0.0, prefix_root=root)


@pytest.mark.parametrize("seed", range(3))
def test_conversations_replay(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = Shape(is_colocated=True, is_elastic=True, num_decode=2, worker_blocks=40, has_prefix_cache=True)
    cluster = RecordedCluster(shape, seed, RecordingConfig(folder=str(tmp_path)))
    for one in conversations(rng, 40):
        cluster.submit(one)
        for _ in range(rng.randrange(40)):
            cluster.step()
        if rng.random() < 0.1:
            cluster.abort(rng.choice(list(cluster.client.requests)))
    cluster.run()
    hits = sum(one._logic._prefixes.num_hit_tokens for name, one in cluster.logics.items() if name != "router")  # type: ignore[union-attr]
    assert hits > 100
    cluster.close()
    replayed = replays(tmp_path)
    assert [one.path.name for one in replayed if one.difference is not None] == []
    assert sum(one.num_equal for one in replayed) > 500


def test_no_root_is_in_a_recording(tmp_path: Path) -> None:
    shape = Shape(is_colocated=True, worker_blocks=40, has_prefix_cache=True)
    cluster = RecordedCluster(shape, 0, RecordingConfig(folder=str(tmp_path), commands=True))
    for one in conversations(random.Random(0), 8):
        cluster.submit(one)
    cluster.run()
    cluster.close()
    written = b"".join(path.read_bytes() for path in recordings_in(tmp_path))
    assert all(root not in written for root in ROOTS if root)


@each("policy", [KeepDecisions(frozenset({EOS}), SECRET), KeepLengths()])
def test_nothing_tells_which_adapter_a_request_names(policy: KeepDecisions | KeepLengths) -> None:
    own = LoraAdapter("support-of-acme", "/adapters/acme", b"a" * 16)
    kept = Redactor(policy)(dataclasses.replace(request("a", 5, 6), adapter=own)).adapter
    assert not any(secret in repr(kept) for secret in ("acme", "aaaa"))


def test_a_redacted_request_says_only_that_it_has_a_grammar() -> None:
    own = SamplingParams(grammar="secret", logit_bias=((5, 1.0),), allowed_token_ids=(5, 6), bad_words=((5,),))
    kept = redactor()(dataclasses.replace(request("a", 5, 6), sampling=own)).sampling
    assert kept == SamplingParams(grammar="redacted")


def test_answers_of_requests_that_share_nothing_are_left_out() -> None:
    redact = redactor()
    redact(request("a", 5, 6, root=b""))
    assert [redact(SampledToken(RequestId("a"), token)).token_id for token in (7, 8, EOS)] == [-1, -1, EOS]


def test_which_requests_share_an_adapter_stays() -> None:
    adapters = [LoraAdapter(name, f"/{name}", digest * 16) for name, digest in [("a", b"1"), ("b", b"1"), ("c", b"2")]]
    redact = redactor()
    first, same, other = [redact(dataclasses.replace(request("a", 5), adapter=one)).adapter for one in adapters]
    assert first == same
    assert first.digest != other.digest


def test_equal_beginnings_stay_equal_and_what_follows_differs() -> None:
    redact = redactor()
    first, second = redact(request("a", 5, 6, 7, 8, 9)), redact(request("b", 5, 6, 1, 8, 9))
    assert first.prompt_token_ids[:2] == second.prompt_token_ids[:2]
    assert all(one != other for one, other in zip(first.prompt_token_ids[2:], second.prompt_token_ids[2:], strict=True))
    other = redact(request("c", 5, 6, 7, 8, 9, root=ROOTS[1]))
    assert not set(first.prompt_token_ids) & set(other.prompt_token_ids)
    assert redact(request("d", 5, 6, root=b"")).prompt_token_ids == (0, 0)


def test_an_answer_continues_its_prompt() -> None:
    """What was sampled is the beginning of the next turn, and of the request when it is resumed."""
    redact = redactor()
    redact(request("a", 5, 6))
    sampled = [redact(SampledToken(RequestId("a"), token)).token_id for token in (7, 8, EOS)]
    next_turn = redact(request("b", 5, 6, 7, 8, EOS, 9))
    assert list(next_turn.prompt_token_ids[2:5]) == sampled
    assert sampled[2] == EOS
    resumed = redact(PrefillRequest(request("a", 5, 6), 1, (7, 8)))
    assert list(resumed.generated_token_ids) == sampled[:2]
    assert redact(SampledToken(RequestId("a"), EOS)).token_id == EOS


def test_a_token_that_ends_an_answer_is_kept_there() -> None:
    redact = redactor()
    redact(request("a", 5, 6, stops=(7,)))
    redact(request("b", 5, 6))
    assert redact(SampledToken(RequestId("a"), 7)).token_id == 7
    assert redact(SampledToken(RequestId("b"), 7)).token_id != 7


def test_blocks_of_a_pool_stay_equal_to_the_tokens_of_their_request() -> None:
    redact, prompt = redactor(), (1, 2, 3, 4, 5, 6, 7, 8, 9)
    redacted = redact(request("a", *prompt)).prompt_token_ids
    packed = tuple(packed_blocks(prompt, 4))
    found = redact(PrefixFound(RequestId("a"), packed_tokens=packed))
    assert found.packed_tokens == tuple(packed_blocks(redacted, 4))
    assert redact(PrefixFound(RequestId("a"), packed_tokens=packed[1:])).packed_tokens == found.packed_tokens[1:]
    strange = redact(PrefixFound(RequestId("a"), packed_tokens=(array("i", (9, 9, 9, 9)).tobytes(),)))
    assert strange.packed_tokens[0] not in (array("i", (9, 9, 9, 9)).tobytes(), *found.packed_tokens)
    assert next(BlockHasher(4).named(ROOTS[0], prompt)).block_hash not in found.packed_tokens


def test_memory_of_chains_is_bounded() -> None:
    chains = TokenChains(SECRET, frozenset(), max_tokens=10)
    for number in range(50):
        chains.begin(request(f"r{number}", *range(4)))
    assert len(chains._chains) <= 3
    assert chains.sampled(RequestId("r0"), 5) is None
    assert chains.sampled(RequestId("r49"), 5) is not None
    assert len(chains.begin(request("long", *range(100)))) == 100
