"""The bytes of every message are pinned, plain MessagePack; whatever is not exactly a message is refused."""

import random
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from alignedserve.core.errors import ProtocolError
from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.core.request import FinishReason
from alignedserve.messages.blocks import BlockClientInbound, BlockServerInbound
from alignedserve.messages.caches import LeasesReleased
from alignedserve.messages.gateways import AbortRequest, TokenDelta, TokensEmitted
from alignedserve.messages.handshake import HandshakeMessage, Ping
from alignedserve.messages.links import (
    DecodeWorkerInbound,
    GatewayInbound,
    PoolInbound,
    PrefillWorkerInbound,
    RouterInbound,
)
from alignedserve.messages.state import StateClientInbound, StateServerInbound
from alignedserve.messages.wire import PROTOCOL_VERSION, Codec, Message
from alignedserve.messages.workers import WorkerLoad
from tests.support.marks import each
from tests.support.samples import DECODE, EXAMPLES, R1, message_types

GOLDEN = Path(__file__).with_name("golden.txt")
UNIONS: dict[str, Any] = {
    "gateway": GatewayInbound,
    "router": RouterInbound,
    "pool": PoolInbound,
    "prefill worker": PrefillWorkerInbound,
    "decode worker": DecodeWorkerInbound,
    "handshake": HandshakeMessage,
    "block server": BlockServerInbound,
    "block client": BlockClientInbound,
    "state server": StateServerInbound,
    "state client": StateClientInbound,
}
EVERYTHING = Codec(reduce(or_, (type(example) for example in EXAMPLES)))


def golden_lines() -> list[str]:
    lines = [f"PROTOCOL_VERSION {PROTOCOL_VERSION}"]
    return lines + [f"{type(example).__name__} {EVERYTHING.encode(example).hex()}" for example in EXAMPLES]


def test_there_is_one_example_of_every_message() -> None:
    assert sorted(type(example).__name__ for example in EXAMPLES) == sorted(kind.__name__ for kind in message_types())


def test_every_message_has_a_receiver_and_none_is_unknown() -> None:
    assert {kind for union in UNIONS.values() for kind in get_args(union)} == message_types()


@each("line", golden_lines(), ids=lambda line: line.split()[0])
def test_bytes_are_those_of_the_golden_file(line: str) -> None:
    assert line in GOLDEN.read_text().splitlines()


def test_the_golden_file_holds_nothing_else() -> None:
    assert GOLDEN.read_text().splitlines() == golden_lines()


@each("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_decoding_gives_the_message_back(example: Message) -> None:
    assert EVERYTHING.decode(EVERYTHING.encode(example)) == example


@each("name", UNIONS)
def test_a_message_of_another_link_is_refused(name: str) -> None:
    codec = Codec(UNIONS[name])
    for example in EXAMPLES:
        if type(example) not in get_args(UNIONS[name]):
            with pytest.raises(ProtocolError, match="Invalid value"):
                codec.decode(EVERYTHING.encode(example))


@each("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_truncation_and_every_trailing_byte_is_refused(example: Message) -> None:
    payload = EVERYTHING.encode(example)
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            EVERYTHING.decode(payload[:length])
    with pytest.raises(ProtocolError):
        EVERYTHING.decode(payload + b"\xc0")


ABORT = ["AbortRequest", "r1", 3]
RELEASE = ["LeasesReleased", [1, 2]]
LOAD = ["WorkerLoad", 0, 0, 0, 0, 0, 0]
REJECTED = ["RequestRejected", "r1", "full", 1.0]


def changed(fields: list[Any], place: int, value: object) -> list[Any]:
    return [*fields[:place], value, *fields[place + 1 :]]


@each(
    "fields",
    [
        None,
        7,
        "AbortRequest",
        [],
        {"type": "AbortRequest", "request_id": "r1"},
        ["Nothing", "r1"],
        ["os.system", "true"],
        ["__class__"],
        [["AbortRequest"], "r1"],
        changed(ABORT, 0, "abortrequest"),
        changed(ABORT, 0, b"AbortRequest"),
        changed(ABORT, 0, 1),
        ["AbortRequest"],
        changed(ABORT, 1, 5),
        changed(ABORT, 1, None),
        changed(ABORT, 1, b"r1"),
        changed(ABORT, 2, "3"),
        changed(ABORT, 2, -1),
        changed(ABORT, 2, (1 << 53) + 1),
        changed(ABORT, 2, 1.5),
        changed(ABORT, 2, True),
        changed(RELEASE, 1, 1),
        changed(RELEASE, 1, "12"),
        changed(RELEASE, 1, ["x"]),
        changed(RELEASE, 1, {"a": 1}),
        changed(LOAD, 3, -1),
        REJECTED[:-1],
        [*LOAD, 0, 0, [1, 2]],
        [*LOAD, 0, 0, [1, 2, -3]],
        ["FormBatch", 1, DECODE, 10, 10, 1, 4],
        ["RequestReturned", "r1", 3, "misplaced"],
        changed(REJECTED, 3, -0.5),
        changed(REJECTED, 3, float("nan")),
        changed(REJECTED, 3, "soon"),
        changed(REJECTED, 2, "x" * 1025),
        ["RequestFailed", "r1", "bad_luck", "reason"],
        ["TokensEmitted", [["r1", 0, [1], [], "tired"]]],
        ["TokensEmitted", [["r1", 0, [-1]]]],
        ["TokensEmitted", [["r1", 0, [(1 << 31) + 1]]]],
        ["TokensEmitted", [["r1", -1, [1]]]],
        ["Hello", 1, "king", "name", bytes(32), bytes(32)],
        ["Hello", 1, "router", "", bytes(32), bytes(32)],
        ["Hello", 1, "router", "n" * 129, bytes(32), bytes(32)],
        ["Challenge", 1, bytes(15)],
        ["Challenge", 1, bytes(65)],
    ],
    ids=str,
)
def test_unknown_tags_wrong_types_and_values_out_of_bounds_are_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        EVERYTHING.decode(msgspec.msgpack.encode(fields))


@each(
    ("field", "value"),
    [("temperature", 3.0), ("top_p", 0.0), ("max_tokens", -1), ("top_k", -5), ("num_logprobs", 21), ("seed", 1 << 63)],
)
def test_sampling_out_of_bounds_is_refused_on_the_wire_as_well(field: str, value: object) -> None:
    example = next(example for example in EXAMPLES if type(example).__name__ == "SubmitRequest")
    raw = msgspec.msgpack.decode(EVERYTHING.encode(example))
    raw[1]["sampling"][field] = value
    with pytest.raises(ProtocolError, match=r"sampling|int64|out of range|between|must"):
        EVERYTHING.decode(msgspec.msgpack.encode(raw))


def test_an_empty_prompt_is_refused_on_the_wire_as_well() -> None:
    example = next(example for example in EXAMPLES if type(example).__name__ == "SubmitRequest")
    raw = msgspec.msgpack.decode(EVERYTHING.encode(example))
    raw[1]["prompt_token_ids"] = []
    with pytest.raises(ProtocolError, match="prompt"):
        EVERYTHING.decode(msgspec.msgpack.encode(raw))


def test_a_later_field_is_ignored_and_an_optional_one_may_be_absent() -> None:
    assert EVERYTHING.decode(msgspec.msgpack.encode(["AbortRequest", "r1"])) == AbortRequest(R1)
    assert EVERYTHING.decode(msgspec.msgpack.encode([*ABORT, "new"])) == AbortRequest(R1, 3)
    assert EVERYTHING.decode(msgspec.msgpack.encode(["Ping", 1.5])) == Ping(1.5)


def test_a_refusal_is_short_and_echoes_no_content() -> None:
    payload = msgspec.msgpack.encode(["WorkerLoad", "secret prompt" * 1000])
    with pytest.raises(ProtocolError) as caught:
        EVERYTHING.decode(payload)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_huge_announced_length_takes_no_memory() -> None:
    payload = EVERYTHING.encode(LeasesReleased((LeaseId(1),)))
    with pytest.raises(ProtocolError):
        EVERYTHING.decode(payload[:-2] + b"\xdd\xff\xff\xff\xff\x01")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        EVERYTHING.decode(b"\x91" * 100_000 + b"\xc0")


def test_random_bytes_are_refused_or_are_a_message() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        payload = rng.randbytes(rng.randrange(64))
        with pytest.raises(ProtocolError):
            EVERYTHING.decode(payload)


def test_flipped_bytes_are_refused_or_are_a_message() -> None:
    rng = random.Random(2)
    payloads = [EVERYTHING.encode(example) for example in EXAMPLES]
    num_refused = 0
    for _ in range(6000):
        payload = bytearray(rng.choice(payloads))
        for _ in range(rng.randrange(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            message = EVERYTHING.decode(bytes(payload))
        except ProtocolError:
            num_refused += 1
        else:
            assert type(message) in message_types()
    assert num_refused > 3000


def test_counts_up_to_the_bound_are_taken() -> None:
    load = WorkerLoad(1 << 40, 0, 0, 0, 0, 0)
    assert EVERYTHING.decode(EVERYTHING.encode(load)) == load


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(golden_lines()) + "\n")


def test_another_implementation_reads_and_writes_our_messages() -> None:
    codec = Codec(GatewayInbound)
    message = TokensEmitted((TokenDelta(RequestId("r"), 3, (7, 8), (), FinishReason.STOP),))
    payload = codec.encode(message)
    assert msgpack.unpackb(payload) == ["TokensEmitted", [["r", 3, [7, 8], [], "stop", 0, b""]], []]
    assert codec.decode(msgpack.packb(["TokensEmitted", [["r", 3, [7, 8], [], "stop"]]])) == message
