"""Two hosts of namespaces: answers across hosts, what they listen on, a bad network, one that is cut off."""

import argparse
import asyncio
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any, NamedTuple

import pytest

from tests.harnesses.hosts.cluster_demo import Verdict, chat_with_another_host, replay_with_fault
from tests.harnesses.hosts.namespace_hosts import obstacle
from tests.harnesses.hosts.port_scan import (
    GATEWAY,
    LINKS,
    LOGIN,
    LOOPBACK,
    RAY_WORKERS,
    listeners_of,
    probe,
    purpose_of,
)
from tests.harnesses.hosts.rehearsal import PORT, Rehearsal
from tests.support.batch_samples import chat_lines
from tests.support.waiting import wait_until

REASON = obstacle()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
]

promise = pytest.mark.promise  # all but moves, which nobody has by default and which take minutes to come about
FAULT_S = 6.0
_MOVE_ROUNDS = 6
_NUM_STREAMS = 20  # eight of which a worker decodes at once
_LONG = 1400  # tokens: an answer goes on, by its objective, for seconds after a move was wished for
_GAPS = 4  # of a gap alone, about what eight together need twice


def complete(url: str, api_key: str) -> str:
    body = {"model": "pocket", "messages": [{"role": "user", "content": "spell otter"}], "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=60.0) as response:
        document: dict[str, Any] = json.load(response)
    return str(document["choices"][0]["message"]["content"])


def ask(url: str, api_key: str, body: bytes | None = None, kind: str = "application/json", **more: str) -> bytes:
    """Ask by GET, or by a POST of this body; `more`: headers."""
    headers = {"content-type": kind, "Authorization": f"Bearer {api_key}", **more}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=60.0) as response:
        content: bytes = response.read()
    return content


def hurt(rehearsal: Rehearsal, fault: str, heal_after: float) -> Verdict:
    options = argparse.Namespace(fault=fault, fault_at=1.0, heal_after=heal_after, duration=9.0, rate=1.0)
    return replay_with_fault(rehearsal, options).verdict


@promise
def test_hosts_serve_together(rehearsal: Rehearsal) -> None:
    first, second = rehearsal.urls()
    assert complete(first, rehearsal.api_key) == complete(second, rehearsal.api_key) == "o t t e r"
    found = rehearsal.status()
    assert [node["hostname"] for node in found["nodes"]] == ["host0", "host1"]
    assert [one["load"]["num_decode_workers"] for one in found["models"]] == [2, 2]
    assert "gateway gateway-1 serves" in rehearsal.on_host(0, "alignedserve logs gateway-1")
    asyncio.run(chat_with_another_host(rehearsal))


@promise
def test_files_and_batches_are_the_same_behind_every_gateway(rehearsal: Rehearsal) -> None:
    first, second = rehearsal.urls()
    key = rehearsal.api_key
    content = chat_lines(5, model="pocket")
    form = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\ncontent-disposition: form-data; '
    )
    form += b'name="file"; filename="a.jsonl"\r\n\r\n' + content + b"\r\n--x--\r\n"
    file = json.loads(ask(f"{second}/v1/files", key, form, "multipart/form-data; boundary=x"))
    assert ask(f"{first}/v1/files/{file['id']}/content", key) == content
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    batch = json.loads(ask(f"{second}/v1/batches", key, json.dumps(wanted).encode()))

    def is_completed() -> bool:
        batch.update(json.loads(ask(f"{second}/v1/batches/{batch['id']}", key)))
        return bool(batch["status"] == "completed")

    wait_until(is_completed, 60.0, lambda: batch)
    results = [ask(f"{url}/v1/files/{batch['output_file_id']}/content", key) for url in (first, second)]
    assert results[0] == results[1]
    assert len(results[0].splitlines()) == 5


@promise
def test_every_port_has_a_purpose_and_refuses_those_without_credentials(rehearsal: Rehearsal) -> None:
    for host in rehearsal.hosts.hosts:
        listeners = listeners_of(host.run("ss", "-ltnpH").stdout)
        purposes = {listener: purpose_of(listener, host.address, PORT) for listener in listeners}
        assert [listener for listener, purpose in purposes.items() if purpose is None] == []
        assert {LINKS, GATEWAY, RAY_WORKERS} <= set(purposes.values())
        probed = {one: one.port for one, purpose in purposes.items() if purpose not in (GATEWAY, LOGIN, LOOPBACK)}
        answered = [(one, tried) for one, port in probed.items() for tried in probe(host.address, port)]
        assert [(one, tried) for one, tried in answered if not tried.is_refused] == []
        refused = {one.port for one, tried in answered if "UNAUTHENTICATED" in tried.answer}
        assert {6381, 6382, 6383} <= refused
    for url in rehearsal.urls():
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(url, "no-such-key")
        assert complete(url, rehearsal.api_key) == "o t t e r"


@promise
def test_a_wrong_token_a_second_cluster_and_a_process_of_another_cluster_are_refused(rehearsal: Rehearsal) -> None:
    said = rehearsal.on_host(1, "RAY_AUTH_TOKEN=wrong RAY_NUM_REDIS_GET_RETRIES=2 alignedserve status")
    assert "cannot join the Ray cluster" in said
    assert "token" in said
    said = rehearsal.on_host(0, "RAY_ADDRESS=auto alignedserve serve --set gateway.port=8100", timeout_s=120.0)
    assert "a cluster serves on these hosts already; end it with `alignedserve stop`" in said


class LongAnswer(NamedTuple):
    """A streamed answer of `_LONG` tokens."""

    prompt: str
    request_id: str
    text: str


def long_request(url: str, api_key: str, prompt: str, **headers: str) -> urllib.request.Request:
    body = {"model": "pocket", "prompt": prompt, "max_tokens": _LONG, "ignore_eos": True, "temperature": 0}
    headers = {"content-type": "application/json", "Authorization": f"Bearer {api_key}", **headers}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps({**body, "stream": True}).encode(), headers)


def text_of(response: HTTPResponse) -> str:
    chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def answers_that_stay(url: str, api_key: str, text: str) -> list[LongAnswer]:
    """Ask for more answers than two workers decode at once, and leave those of one; return the other's.

    One worker has all its time then; at the other prompts wait, and half of each gap is taken.
    """

    def answer_to(prompt: str) -> LongAnswer | None:
        with urllib.request.urlopen(long_request(url, api_key, prompt, **objective), timeout=60.0) as response:
            request_id = f"cmpl-{response.headers['x-request-id']}"
            wait_until(lambda: bool(places_of(url, api_key, request_id, "accepted")), 30.0, lambda: request_id)
            if places_of(url, api_key, request_id, "accepted") != ["worker-0"]:
                return None
            return LongAnswer(prompt, request_id, text_of(response))

    began_s = time.perf_counter()
    with urllib.request.urlopen(long_request(url, api_key, text), timeout=60.0) as response:
        text_of(response)
    objective = {"x-slo-tpot-ms": f"{_GAPS * 1e3 * (time.perf_counter() - began_s) / _LONG:.2f}"}
    with ThreadPoolExecutor(_NUM_STREAMS) as pool:
        answers = pool.map(answer_to, [f"{stream} {text}" for stream in range(_NUM_STREAMS)])
        return [one for one in answers if one is not None]


def places_of(url: str, api_key: str, request_id: str, step: str) -> list[str]:
    """Return where a request took this step, so far."""
    course = json.loads(ask(f"{url}/v1/requests/{request_id}", api_key))
    return [event["where"] for event in course["choices"][0]["events"] if event["step"] == step]


def is_complete(url: str, api_key: str, request_id: str) -> bool:
    """Return True once all have told their part of the course of a request."""
    return bool(json.loads(ask(f"{url}/v1/requests/{request_id}", api_key))["complete"])


def moved_answers(url: str, api_key: str, text: str) -> list[LongAnswer]:
    answers = answers_that_stay(url, api_key, text)
    wait_until(lambda: all(is_complete(url, api_key, one.request_id) for one in answers), 30.0, lambda: answers)
    return [one for one in answers if places_of(url, api_key, one.request_id, "moved")]


def test_a_decode_moves_to_another_host_and_its_answer_is_the_same(rehearsal: Rehearsal) -> None:
    url, key = rehearsal.urls()[0], rehearsal.api_key
    texts = (f"text {number}" + 200 * " otter" for number in range(_MOVE_ROUNDS))
    moved = next((found for text in texts if (found := moved_answers(url, key, text))), [])
    assert moved
    for prompt, _, text in moved:
        with urllib.request.urlopen(long_request(url, key, prompt), timeout=60.0) as response:
            assert text_of(response) == text
    said = rehearsal.on_host(0, f"ALIGNEDSERVE_API_KEY={key} alignedserve explain {moved[0].request_id} --url {url}")
    assert "moved to worker-" in " ".join(said.split()), said


@promise
@pytest.mark.parametrize("fault", ["loss", "delay"])
def test_answers_arrive_whole_over_a_bad_network(rehearsal: Rehearsal, fault: str) -> None:
    verdict = hurt(rehearsal, fault, FAULT_S)
    assert verdict.is_passed, verdict
    rehearsal.wait_until_used(rehearsal.hosts.hosts[1])


@promise
def test_a_host_that_was_cut_off_is_used_again(rehearsal: Rehearsal) -> None:
    """One that is killed is: test_models_on_hosts.py."""
    verdict = hurt(rehearsal, "cut", 8.0)
    assert verdict.is_passed, verdict
    rehearsal.wait_until_used(rehearsal.hosts.hosts[1])
    assert [node["name"] for node in rehearsal.status()["nodes"]] == ["node-0", "node-1"]
    assert complete(rehearsal.urls()[1], rehearsal.api_key) == "o t t e r"
