import pytest

from alignedserve.client.openai_client import ClientFailureKind, CompletionOutcome, take_events
from alignedserve.client.sse import SseEvent, SseParser, error_message, read_chunk
from alignedserve.core.errors import ProtocolError


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    stream = b": hello\n\ndata: one\n\nevent: error\r\ndata: two\r\ndata:three\r\n\r\n\n\ndata: never ended\n"
    parser = SseParser()
    events = [event for start in range(0, len(stream), size) for event in parser.feed(stream[start : start + size])]
    assert events == [SseEvent(b"one"), SseEvent(b"two\nthree", b"error")]


def test_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.client.sse.MAX_EVENT_BYTES", 10)
    with pytest.raises(ProtocolError, match="larger than"):
        SseParser().feed(b"x" * 11)


@pytest.mark.parametrize("payload", [b"not json", b"[1]", b'{"choices": 3}', b'{"choices": [{"text": 3}]}', b"\xff"])
def test_what_is_no_chunk_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_chunk(SseEvent(payload))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "old style"}', "old style"),
        (b"<html>502</html>", "<html>502</html>"),
    ],
)
def test_error_messages_of_several_servers(body: bytes, message: str) -> None:
    assert error_message(body) == message


def _take(*payloads: bytes) -> CompletionOutcome:
    outcome = CompletionOutcome()
    take_events([SseEvent(payload) for payload in payloads], outcome, 5.0)
    return outcome


def test_logprobs_tell_how_many_tokens_a_chunk_holds() -> None:
    outcome = _take(b'{"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{"t": 1}, {"t": 2}]}}]}')
    assert outcome.token_times_s == [5.0, 5.0]


def test_running_usage_tells_how_many_tokens_a_chunk_holds() -> None:
    chunk = b'{"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}'
    outcome = _take(chunk % 3, chunk % 4)
    assert len(outcome.token_times_s) == 4


def test_final_usage_overrules_the_sum_but_not_the_times() -> None:
    outcome = _take(
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {"content": "ab"}}]}',
        b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}',
    )
    assert (len(outcome.token_times_s), outcome.num_tokens, outcome.num_prompt_tokens) == (1, 2, 9)


def test_cached_tokens_are_read_where_the_server_tells_them() -> None:
    usage = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": %b}}'
    told = [_take(usage % details).num_cached_tokens for details in (b'{"cached_tokens": 8}', b"{}", b"null")]
    assert told == [8, 0, 0]


def test_error_object_without_an_event_name() -> None:
    outcome = _take(b'{"error": {"message": "worker lost"}}')
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.message) == (ClientFailureKind.ERROR_EVENT, "worker lost")
