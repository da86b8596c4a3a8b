"""What a cache that keeps everything would hit, as a bound on what real ones can."""

from collections.abc import Sequence

from lab.workload.requests import TextRun


class PromptBlocks:
    """Numbers the blocks of prompts by what they hold and what comes before them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int, tuple[TextRun, ...]], int] = {}

    def of(self, runs: Sequence[TextRun], prompt_len: int) -> list[int]:
        """Return the numbers of the full blocks that a prompt's runs cover, the last token of the prompt left out."""
        size, parent, numbers = self._block_size, -1, []
        num_left = prompt_len - 1  # a prompt's last token is always computed
        piece: list[TextRun] = []
        room = size
        for run in runs:
            rest = min(run.num_tokens, num_left)
            num_left -= rest
            while rest >= room:
                piece.append(TextRun(run.text, room))
                rest, room = rest - room, size
                parent = self._numbers.setdefault((parent, tuple(piece)), len(self._numbers))
                numbers.append(parent)
                piece = []
            if rest:
                piece.append(TextRun(run.text, rest))
                room -= rest
        return numbers


def most_hits(prompts: Sequence[Sequence[int]]) -> int:
    """Count the blocks, one prompt after the other, that an earlier prompt had with all blocks before them."""
    cached: set[int] = set()
    num_hits = 0
    for prompt in prompts:
        num_hits += next((place for place, block in enumerate(prompt) if block not in cached), len(prompt))
        cached.update(prompt)
    return num_hits
