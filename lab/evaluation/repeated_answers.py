"""Answers given under load and faults, asked for again alone on the idle system: they must be the same, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from alignedserve.client.openai_client import CompletionOutcome
from lab.loadgen.load_generator import SentRequest

MAX_REPEATED = 24  # answers


@dataclass(frozen=True, slots=True)
class RepeatedAnswers:
    """Comparison of answers with the answers that the same prompts got alone."""

    num_compared: int
    num_other_words: int
    num_other_logprobs: int  # among those with the same words
    longest_pause_s: float  # between two tokens of any of them: where a worker was lost, or stopped


def most_disturbed(sent: Sequence[SentRequest]) -> list[SentRequest]:
    """Return the completed requests with the longest pauses within their answers, as faults interrupted them."""
    completed = [request for request in sent if request.outcome.failure is None]
    return sorted(completed, key=lambda answer: longest_pause_s(answer.outcome), reverse=True)[:MAX_REPEATED]


def longest_pause_s(outcome: CompletionOutcome) -> float:
    """Return the longest wait for a token: the first one since the request was sent, or the next one."""
    return max((after - before for before, after in pairwise((outcome.sent_s, *outcome.token_times_s))), default=0.0)


def compare_answers(pairs: Sequence[tuple[CompletionOutcome, CompletionOutcome]]) -> RepeatedAnswers:
    """Compare answers (under load, alone); log-probabilities by the JSON that tells them, which is exact."""
    is_same_text = [under_load.text == alone.text for under_load, alone in pairs]
    is_same = [under_load.logprobs == alone.logprobs for under_load, alone in pairs]
    return RepeatedAnswers(
        num_compared=len(pairs),
        num_other_words=is_same_text.count(False),
        num_other_logprobs=sum(words and not all_of_it for words, all_of_it in zip(is_same_text, is_same, strict=True)),
        longest_pause_s=max((longest_pause_s(under_load) for under_load, _ in pairs), default=0.0),
    )
