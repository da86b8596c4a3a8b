"""The turns of an encoder of pictures between iterations: how long one may be, and what the next ones will cost.

A turn makes one gap of every answer longer. So it ends in time for the tightest mean gap that a client was promised:
what its objective allows, less the time of an iteration. A turn takes at least one step: pictures are never stuck.
Example: a promise of 150 ms, iterations of 100 ms: 0.9 * 150 - 100 = 35 ms, which a turn may take; with iterations of
130 ms: 5 ms. Beyond that a turn is no longer than iterations are (20 ms where these are shorter), and than 100 ms, as
a chat that comes waits for it.

The policy packs iterations by what gaps may be as well. What turns take has to come off that, or iterations filled with
documents would leave no time for them: to its cost model every iteration is longer by a turn while there are some.
"""

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork

LONGEST_TURN_S = 0.02  # beside shorter iterations
_MOST_S = 0.1  # beside any
_PROMISED_SHARE = 0.9  # of a promised gap: the rest is for errors
_WEIGHT = 0.3  # of the latest iteration, or turn, beside those before it
_LEAST_S = 1e-4  # of expected turns: shorter ones are none


class TurnLengths:
    """Decides how long turns are, by the sequences that a worker computes and the times of its iterations."""

    def __init__(self) -> None:
        self._promised_s: dict[RequestId, float] = {}  # mean gaps
        self._iteration_s = 0.0
        self._latest_s = 0.0  # turn, since the latest iteration

    def enter(self, request: Request) -> None:
        """Note a sequence that is added."""
        if request.slo.tpot_s is not None:
            self._promised_s[request.request_id] = request.slo.tpot_s

    def leave(self, request_id: RequestId) -> None:
        """Note a sequence that is removed."""
        self._promised_s.pop(request_id, None)

    def took(self, turn_s: float) -> None:
        """Note a turn that took so long."""
        self._latest_s = turn_s

    def before_iteration(self) -> float:
        """Return the seconds of the latest turn, once: an iteration that waits waits for one."""
        latest_s, self._latest_s = self._latest_s, 0.0
        return latest_s

    def ran(self, duration_s: float) -> None:
        """Note an iteration that took so long, turns not included."""
        self._iteration_s += _WEIGHT * (duration_s - self._iteration_s)

    @property
    def turn_s(self) -> float:
        """Return the seconds after which a turn ends, with the step that reaches them."""
        longest_s = min(max(self._iteration_s, LONGEST_TURN_S), _MOST_S)  # half of the time, of long iterations
        if not self._promised_s:
            return longest_s
        spare_s = _PROMISED_SHARE * min(self._promised_s.values()) - self._iteration_s
        return min(max(spare_s, 0.0), longest_s)


class ExpectedTurns:
    """Learns what a turn adds to an iteration. Deterministic."""

    def __init__(self) -> None:
        self._mean_s = 0.0

    def note(self, turn_s: float) -> None:
        if turn_s or self._mean_s:
            self._mean_s += _WEIGHT * (turn_s - self._mean_s)
            self._mean_s = self._mean_s if self._mean_s >= _LEAST_S else 0.0

    def beside(self, costs: CostModel) -> CostModel:
        """Return the costs of iterations with the turns beside them: the same model while there are none."""
        return CostsWithTurns(costs, self._mean_s) if self._mean_s else costs


class CostsWithTurns:
    """A cost model to which every iteration is longer by a turn."""

    def __init__(self, costs: CostModel, turn_s: float) -> None:
        self._costs = costs
        self._turn_s = turn_s

    def iteration_s(self, work: IterationWork) -> float:
        return self._costs.iteration_s(work) + self._turn_s

    def swap_s(self, num_tokens: float) -> float:
        return self._costs.swap_s(num_tokens)
