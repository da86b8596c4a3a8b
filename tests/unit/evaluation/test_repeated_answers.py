from alignedserve.client.openai_client import ClientFailure, ClientFailureKind, CompletionOutcome
from lab.evaluation.repeated_answers import MAX_REPEATED, compare_answers, most_disturbed
from lab.loadgen.load_generator import SentRequest
from lab.loadgen.load_plan import LoadRequest


def outcome(text: str, logprobs: tuple[str, ...], *token_times_s: float) -> CompletionOutcome:
    return CompletionOutcome(
        token_times_s=list(token_times_s), text_parts=[text], logprobs=[one.encode() for one in logprobs]
    )


def sent(index: int, *token_times_s: float, failure: ClientFailure | None = None) -> SentRequest:
    one = outcome("a", (), *token_times_s)
    one.failure = failure
    return SentRequest(LoadRequest(index, "demo", 0.0, 1, 1), one, 0.0)


def test_those_with_the_longest_pauses_are_asked_for_again() -> None:
    failed = sent(0, 0.1, 9.0, failure=ClientFailure(ClientFailureKind.TIMEOUT, "late"))
    quick, late_start, interrupted = sent(1, 0.1, 0.2), sent(2, 1.0, 1.1), sent(3, 0.1, 4.0, 4.1)
    chosen = most_disturbed([failed, quick, late_start, interrupted])
    assert [one.request.index for one in chosen] == [3, 2, 1]
    assert len(most_disturbed([quick] * 100)) == MAX_REPEATED


def test_other_words_and_other_probabilities_are_told_apart() -> None:
    under_load = outcome("ab", ("-0.1", "-0.2"), 1.0, 3.5)
    alone = (
        outcome("ab", ("-0.1", "-0.2")),
        outcome("ab", ("-0.1", "-0.20000001")),
        outcome("ac", ("-0.1", "-0.7")),
    )
    compared = compare_answers([(under_load, one) for one in alone])
    assert (compared.num_compared, compared.num_other_words, compared.num_other_logprobs) == (3, 1, 1)
    assert compared.longest_pause_s == 2.5
