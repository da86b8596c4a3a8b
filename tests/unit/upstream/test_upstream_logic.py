"""Which call goes to which upstream, and when: single decisions, and random histories before a simulated server."""

import random

import pytest

from alignedserve.core.request import RequestClass, Slo
from alignedserve.upstream.dialect import (
    AnswerUsage,
    EventCutter,
    Manners,
    body_for,
    known_code,
    read_models,
    says_nothing,
)
from alignedserve.upstream.logic import CHAT, DOCUMENT, Fingerprint, UpstreamLogic, WaitingCall
from tests.harnesses.upstream_simulation import DoorSimulation, SimulatedServer

A, B = "http://a", "http://b"


def logic(*urls: str) -> UpstreamLogic:
    made = UpstreamLogic(urls or (A, B))
    for url in made.upstreams:
        made.on_listed(url, {"m": Fingerprint()})
        made.upstreams[url].credit = 1e6  # of prompts' tokens
    return made


def call(name: str, kind: RequestClass = CHAT, *, tenant: str = "t", beginnings: tuple[int, ...] = ()) -> WaitingCall:
    return WaitingCall(name, "m", kind, tenant, 1.0, 10, Slo(1.0, 0.1), beginnings, may_be_shed=kind is DOCUMENT)


def placed(door: UpstreamLogic, *calls: WaitingCall, now: float = 0.0) -> list[str]:
    for item in calls:
        door.arrive(item, now)
    return [started.url for started in door.starts(now)]


def test_calls_go_to_the_idlest_and_back_to_where_their_prompt_began() -> None:
    door = logic()
    assert placed(door, *(call(str(index)) for index in range(4))) == [A, B, A, B]
    assert placed(door, call("long", beginnings=(1, 2, 3))) == [A]
    assert placed(door, call("same", beginnings=(1, 2, 4))) == [A]
    assert placed(door, call("other", beginnings=(7,))) == [B]


def test_an_upstream_that_fails_is_avoided_and_after_three_failures_left_out() -> None:
    door, again = logic(), call("again")
    again.avoided = frozenset({A})
    assert placed(door, again) == [B]
    for _ in range(3):
        door.on_strike(A, "it fails", 0.0)
    assert placed(door, call("1"), call("2")) == [B, B]
    assert door.due_looks(0.4) == [B]  # its first
    assert door.due_looks(0.6) == [A]
    door.on_listed(A, {"m": Fingerprint()})
    assert placed(door, call("3")) == [A]


def test_documents_wait_for_a_place_and_clients_take_turns() -> None:
    door = logic(A)
    many = [call(f"x{index}", DOCUMENT, tenant="x") for index in range(6)]
    assert placed(door, *many, call("y0", DOCUMENT, tenant="y")) == [A, A]
    assert sorted(door.upstreams[A].calls) == ["x0", "y0"]
    assert placed(door, call("chat")) == [A]  # which waits for no document


def test_a_document_that_leaves_frees_its_place_once() -> None:
    door, first, second = logic(A), call("1", DOCUMENT), call("2", DOCUMENT)
    placed(door, first, second, call("3", DOCUMENT))
    for _ in range(2):
        door.end(first, is_answered=True)
    assert [started.call_id for started in door.starts(0.0)] == ["3"]
    assert door.upstreams[A].num_answered == 1


def test_models_that_differ_under_one_name_are_kept_apart() -> None:
    door = UpstreamLogic([A, B])
    assert not door.on_listed(A, {"m": Fingerprint(probe_tokens=20), "n": Fingerprint()})
    problems = door.on_listed(B, {"m": Fingerprint(probe_tokens=21), "n": Fingerprint("folder")})
    assert problems == ["http://b and http://a serve different models under the name m"]
    assert [item.url for item in door.serving("n")] == [A, B]
    assert [item.url for item in door.serving("m")] == [A]


@pytest.mark.parametrize(
    ("simulation", "points", "least_documents_per_s"),
    [
        (DoorSimulation(), 10, 0.35),
        (DoorSimulation(rate=2.5), 10, 0.08),
        (DoorSimulation(rate=8.0, slo=Slo(0.5, 0.05), servers=[SimulatedServer(0.01, 0.00002, 2048)]), 2, 25.0),
        (DoorSimulation(rate=1.6, servers=[SimulatedServer(), SimulatedServer()]), 10, 0.7),
    ],
    ids=["slow", "busy", "fast", "two servers"],
)
def test_chat_keeps_its_objectives_beside_documents(
    simulation: DoorSimulation, points: float, least_documents_per_s: float
) -> None:
    beside = simulation.run(150.0)
    simulation.num_documents = 0
    alone = simulation.run(150.0)
    assert beside.held >= alone.held - points / 100
    assert beside.documents_per_s >= least_documents_per_s


def test_documents_start_again_after_chat_has_pressed_them_out() -> None:
    simulation = DoorSimulation(rate=6.0, slo=Slo(0.3, 0.1))
    simulation.run(60.0)
    door, now = simulation.logic, 1000.0
    for item in [*simulation.calls.values()]:
        door.end(item, is_answered=False)
    for _ in range(100):
        door.tick(now)
    assert placed(door, call("document", DOCUMENT), now=now) == ["http://0"]


@pytest.mark.parametrize("seed", range(20))
def test_no_call_is_lost_or_doubled_in_random_histories(seed: int) -> None:
    rng, door, now = random.Random(seed), logic(), 0.0
    waiting: dict[str, WaitingCall] = {}
    running: dict[str, WaitingCall] = {}
    for number in range(400):
        now += rng.random() / 4
        act = rng.randrange(6)
        if act < 2:
            item = call(str(number), rng.choice((CHAT, DOCUMENT)), tenant=rng.choice("abc"))
            waiting[item.call_id] = item
            door.arrive(item, now)
        elif act == 2 and running:
            item = running.pop(rng.choice(list(running)))
            door.on_token(item, 3, now)
            door.end(item, is_answered=rng.random() < 0.8)
        elif act == 3 and waiting:
            door.end(waiting.pop(rng.choice(list(waiting))), is_answered=False)
        elif act == 4:
            url = rng.choice((A, B))
            if rng.random() < 0.3:
                door.on_strike(url, "x", now)
            else:
                door.on_listed(url, {"m": Fingerprint()})
        for item in door.tick(now):
            door.end(item, is_answered=False)
            waiting[item.call_id] = running.pop(item.call_id)
            door.arrive(item, now)
        for started in door.starts(now):
            item = waiting.pop(started.call_id)
            assert started.call_id not in running
            assert door.upstreams[started.url].is_up
            running[started.call_id] = item
        assert set(running) == {name for item in door.upstreams.values() for name in item.calls}
        assert len(waiting) == sum(door.num_waiting("m", kind) for kind in (CHAT, DOCUMENT))


# --- what upstreams say


def cut(*parts: bytes, shows_usage: bool = False) -> tuple[bytes, EventCutter, AnswerUsage]:
    usage = AnswerUsage.of(b"x" * 40)
    cutter = EventCutter(usage, shows_usage=shows_usage)
    return b"".join(map(cutter.feed, parts)), cutter, usage


TOKEN = b'data: {"choices":[{"delta":{"content":" a"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_streams_are_cut_where_events_end() -> None:
    stream = TOKEN + TOKEN + LAST + COUNTS + DONE
    for size in (1, 7, 50, len(stream)):
        passed, cutter, usage = cut(*(stream[at : at + size] for at in range(0, len(stream), size)))
        assert passed == TOKEN + TOKEN + LAST + DONE
        assert (cutter.is_complete, cutter.is_done, usage.prompt_tokens, usage.output_tokens) == (True, True, 9, 2)
    assert cut(TOKEN + TOKEN[:-1])[0] == TOKEN  # half an event is none
    assert not cut(TOKEN)[1].is_complete
    assert cut(COUNTS, shows_usage=True)[0] == COUNTS
    passed, cutter, _ = cut(TOKEN + b'data: {"error":{"message":"secret"}}\n\n' + TOKEN)
    assert (passed, cutter.problem) == (TOKEN, "its stream ended with an error")


@pytest.mark.parametrize(
    ("said", "prompt", "output"),
    [
        (b'{"prompt_tokens":9,"completion_tokens":2}', 9, 2),
        (b'{"prompt_tokens":-1,"completion_tokens":-1}', 11, 1),
        (b'{"prompt_tokens":1099511627776,"completion_tokens":1099511627776}', 11, 1),
        (b'{"prompt_tokens":null,"completion_tokens":0}', 11, 1),
        (b'{"input_tokens":8,"output_tokens":3}', 8, 3),
    ],
)
def test_usage_that_cannot_be_true_is_counted(said: bytes, prompt: int, output: int) -> None:
    _, _, usage = cut(TOKEN, b'data: {"choices":[],"usage":%b}\n\n' % said)
    assert (usage.prompt_tokens, usage.output_tokens) == (prompt, output)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"message":"This model\'s maximum context length is 8"}}', "context_length_exceeded"),
        (b'{"error":{"code":"model_not_found","message":"secret"}}', "model_not_found"),
        (b'{"error":{"code":"secret"}}', None),
        (b"\xff\x00", None),
    ],
)
def test_only_codes_that_mean_the_same_everywhere_are_repeated(body: bytes, code: str | None) -> None:
    assert known_code(body) == code


def test_bodies_go_as_they_came_but_for_what_is_added() -> None:
    fields = {"model": "m", "stream": True, "odd": 1, "service_tier": "flex"}
    path = "/v1/chat/completions"
    added = b'{"model":"m","stream":true,"odd":1,"stream_options":{"include_usage":true},"priority":10}'
    assert body_for(fields, Manners("vllm"), path, is_document=True) == (added, True)
    plain = b'{"model":"m","stream":true,"odd":1}'
    assert body_for(fields, Manners("vllm", takes_additions=False), path, is_document=True) == (plain, False)
    assert b"flex" in body_for(fields, Manners("alignedserve"), path, is_document=True)[0]


def test_lists_of_models_and_beginnings_of_answers() -> None:
    listed = read_models(b'{"data":[{"id":"m","root":"/x/y","max_model_len":99,"more":1},{"id":"bad name"}]}')
    assert [(item.name, item.fingerprint.root, item.max_context_len) for item in listed] == [("m", "y", 99)]
    assert says_nothing(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert not says_nothing(TOKEN)
