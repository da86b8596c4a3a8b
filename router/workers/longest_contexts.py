"""How long a context workers have room for, at most."""

from alignedserve.core.request import Request
from router.ranking import Ranking
from router.state import WorkerRecord


class LongestContexts:
    """The workers by the tokens that their cache blocks hold, those that compute prompts and those that decode."""

    def __init__(self) -> None:
        self._of_prompts: Ranking[int] = Ranking()  # tokens, negated: the longest first
        self._of_decodes: Ranking[int] = Ranking()

    def add(self, worker: WorkerRecord) -> None:
        num_tokens = worker.tokens_in(worker.registered.num_blocks)
        if worker.registered.can_prefill:
            self._of_prompts.put(worker.name, -num_tokens)
        if worker.registered.can_decode:
            self._of_decodes.put(worker.name, -num_tokens)

    def discard(self, name: str) -> None:
        self._of_prompts.discard(name)
        self._of_decodes.discard(name)

    def can_hold(self, request: Request) -> bool:
        """Return whether its prompt fits a worker that computes prompts, and all of it one that decodes.

        Where there is no such worker it is taken to fit: one may come.
        """
        return _fits(request.prompt_len, self._of_prompts) and _fits(request.max_context_len, self._of_decodes)


def _fits(num_tokens: int, workers: Ranking[int]) -> bool:
    longest = workers.first()
    return longest is None or num_tokens <= -longest.rank
