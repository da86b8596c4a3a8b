"""How many tokens may be drafted of which request in an iteration: as many as are forecast to pay.

A draft is computed like one more decode, and brings a token if all drafts up to there are right. The share of right
drafts is learned of every request. Drafts are allowed while the iteration brings more tokens a second with them, and no
gap becomes longer than objectives allow: none where many requests share an iteration.
"""

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import IterationLimits, IterationPlan
from alignedserve.scheduling.table import Floats, Ints, RequestTable
from alignedserve.scheduling.table_operations import note_decodes

_COUNTS = (1, 2, 4, 8, 12)  # of drafts of a request
# Of right drafts: of a new request, of one whose drafts are wrong, and of one whose drafts are right.
_FIRST_SHARE, _LEAST_SHARE, _MOST_SHARE = 0.5, 0.1, 0.99
_WEIGHT = 0.15  # of the latest draft in that share
_MARGIN = 1.03  # by which tokens a second must grow: errors of the cost model
_SLACK_SHARE = 0.9  # of a mean gap that an iteration with drafts may take


class DraftLimits:
    """Allows drafts, and learns how many are right."""

    def __init__(self) -> None:
        self._shares: dict[RequestId, float] = {}

    def allow(
        self, table: RequestTable, plan: IterationPlan, costs: CostModel, limits: IterationLimits
    ) -> tuple[tuple[RequestId, int], ...]:
        """Return how many tokens may be drafted of each request of the plan; empty: of none."""
        if not plan.scheduled or plan.evictions or plan.uploads or any(part.num_tokens > 1 for part in plan.scheduled):
            return ()
        rows = np.array([part.row for part in plan.scheduled], np.int64)
        if (table.num_remaining[rows] > 1).any() or table.num_swapped[rows].any():
            return ()
        self._forget(table)
        request_ids = [table.request_ids[row] for row in rows.tolist()]
        shares = np.array([self._shares.get(request_id, _FIRST_SHARE) for request_id in request_ids])
        count = self._count(table, rows, shares, costs, limits)
        return tuple((request_id, count) for request_id in request_ids) if count else ()

    def note(self, drafted: tuple[tuple[RequestId, int, int], ...]) -> None:
        """Take note of drafts and right ones of each request."""
        for request_id, num_drafts, num_right in drafted:
            share = self._shares.get(request_id, _FIRST_SHARE)
            for is_right in [True] * num_right + [False] * (num_right < num_drafts):
                share += _WEIGHT * (is_right - share)
            self._shares[request_id] = min(max(share, _LEAST_SHARE), _MOST_SHARE)

    def _count(self, table: RequestTable, rows: Ints, shares: Floats, costs: CostModel, limits: IterationLimits) -> int:
        work = IterationWork()
        note_decodes(work, table, rows)
        alone_s, allowed_s = costs.iteration_s(work), _SLACK_SHARE * float(np.min(table.tpot_s[rows]))
        num_rows, best, best_count = len(rows), _MARGIN * len(rows) / max(alone_s, 1e-9), 0
        for count in _COUNTS:
            if num_rows * (count + 1) > limits.max_tokens:
                break
            with_drafts = work.copy()
            with_drafts.add_decodes(num_rows * count, work.decode_context_len * count, work.max_decode_context_len)
            iteration_s = costs.iteration_s(with_drafts)
            gained = float((shares * (1.0 - shares**count) / (1.0 - shares)).sum())
            rate = (num_rows + gained) / max(iteration_s, 1e-9)
            if rate <= best or iteration_s > allowed_s:
                break
            best, best_count = rate, count
        return best_count

    def _forget(self, table: RequestTable) -> None:
        if len(self._shares) > 2 * len(table) + 16:
            self._shares = {key: share for key, share in self._shares.items() if key in table}
