"""Shares in percent."""

from alignedserve.core.metrics import in_percent
from tests.support.marks import each


@each(
    ("share", "digits", "words"),
    [
        (1.0, 1, "100.0%"),
        (0.0, 1, "0.0%"),
        (0.7654, 1, "76.5%"),
        (0.9996, 1, "99.96%"),  # four of ten thousand chats were late
        (0.999999, 0, "99.9999%"),
        (0.0002, 1, "0.02%"),
        (1.25, 0, "125%"),
        (1.0 - 1e-15, 2, "100.00%"),  # a sum of floats
    ],
)
def test_only_what_is_whole_reads_as_whole_and_nothing_but_none_as_none(share: float, digits: int, words: str) -> None:
    assert in_percent(share, digits) == words
