"""Whether steps that decode are cut into groups, one for each stage: where that gives more tokens per second.

Groups keep all stages at work, and each stage reads its weights once for every group. Where reading the weights is what
takes the time, or where the stages share their cores, a step in one piece may be as quick or quicker. So both are tried
for some steps each, for every size of batch, and what was quicker stays for some hundreds.
"""

from dataclasses import dataclass, field

_TRIAL_STEPS = 12  # of each way
_KEPT_STEPS = 600
_SKIPPED = 2  # steps after a change, which still see the other way


@dataclass(slots=True)
class _Size:
    is_grouped: bool = True  # now
    is_trial: bool = True
    num_left: int = _TRIAL_STEPS + _SKIPPED  # steps until the next decision
    seconds: dict[bool, list[float]] = field(
        default_factory=lambda: {True: [], False: []}
    )  # of the trials, by sequence


class GroupChoice:
    """Decides for each step, and is told how long it took."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._latest: tuple[int, bool] | None = None  # size and way of the step before

    def is_grouped(self, num_sequences: int) -> bool:
        return num_sequences > 1 and self._of(num_sequences).is_grouped

    def note(self, num_sequences: int, seconds: float) -> None:
        """Note a step that was decided by `is_grouped`, and the seconds from the end of the one before to its end."""
        if num_sequences < 2:
            self.forget()
            return
        size = self._of(num_sequences)
        known, self._latest = self._latest, (num_sequences.bit_length(), size.is_grouped)
        if known != self._latest:  # the step before was another
            return
        size.num_left -= 1
        if size.is_trial and size.num_left < _TRIAL_STEPS:
            size.seconds[size.is_grouped].append(seconds / num_sequences)
        if size.num_left <= 0:
            self._decide(size)

    def forget(self) -> None:
        """Note a step of another kind, which the next one is not to be compared with."""
        self._latest = None

    def _of(self, num_sequences: int) -> _Size:
        return self._sizes.setdefault(num_sequences.bit_length(), _Size())

    def _decide(self, size: _Size) -> None:
        if not size.is_trial:
            size.seconds = {True: [], False: []}
            size.is_trial, size.num_left = True, _TRIAL_STEPS + _SKIPPED
            return
        if not size.seconds[not size.is_grouped]:
            size.is_grouped, size.num_left = not size.is_grouped, _TRIAL_STEPS + _SKIPPED
            return
        medians = {way: sorted(seconds)[len(seconds) // 2] for way, seconds in size.seconds.items()}
        size.is_grouped = medians[True] <= medians[False]
        size.is_trial, size.num_left = False, _KEPT_STEPS
