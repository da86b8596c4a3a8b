"""The floor of best-effort work: its share of the tokens while real-time requests wait, and nothing beyond.

Example: the share is 5 %. A document of 1 000 tokens waits while chat keeps a queue filled. Each token of chat that
goes owes the document 0.05 / 0.95 tokens: it is due after 19 000 tokens of chat.
So the tokens that go before a real-time request are at most those of the real-time requests before it, `r`, of the
floor, `r * share / (1 - share)`, and of one best-effort request.
"""


class ClassFloor:
    """Counts the tokens that best effort may have before the real-time requests that wait."""

    def __init__(self, share: float) -> None:
        """`share`: at least 0 and below 1."""
        self.owed_share = share / (1.0 - share)  # for each token of a real-time request
        self.owed = 0.0  # tokens

    def is_due(self, num_tokens: int) -> bool:
        """Return whether a best-effort request of so many tokens may go before real-time ones."""
        return self.owed >= num_tokens

    def note_real_time(self, num_tokens: int, next_tokens: int) -> None:
        """Note a real-time request that goes while the next best-effort one, of `next_tokens`, waits.

        Never more than one request's worth is owed: what could not go meanwhile does not come in a burst.
        """
        self.owed = min(self.owed + self.owed_share * num_tokens, next_tokens)

    def note_best_effort(self, num_tokens: int) -> None:
        """Note a best-effort request that goes."""
        self.owed = max(self.owed - num_tokens, 0.0)
