"""Predictions that come after their request was given to a worker.

Nothing waits for a prediction, so it may find the request anywhere, or between two holders: what one of them passed on
just before does not have it. So it goes to the holder, and once more to every later one of that dispatch.
"""

from alignedserve.messages.events import Send
from alignedserve.messages.workers import SetPredictedLength
from router.policies.forecast import doubled_past
from router.state import TrackedRequest


def expected_len(tracked: TrackedRequest, predicted_len: float | None = None) -> float:
    """Return the length predicted on arrival, or this one, doubled until it exceeds what was generated since."""
    if predicted_len is None:
        predicted_len = tracked.predicted_output_len
    return doubled_past(predicted_len, len(tracked.generated_token_ids), tracked.request.sampling.max_tokens)


def note_prediction(tracked: TrackedRequest, predicted_len: float) -> list[Send]:
    """Note a request's prediction, and tell it to the worker or pool that has the request; none has one that waits."""
    tracked.predicted_output_len = min(predicted_len, float(tracked.request.sampling.max_tokens))
    tracked.is_length_predicted = True
    tracked.is_prediction_late = tracked.holder is not None
    return tell_holder(tracked)


def tell_holder(tracked: TrackedRequest) -> list[Send]:
    """Tell a late prediction to the holder that the request has now, which may have got it without."""
    if not tracked.is_prediction_late or tracked.holder is None:
        return []
    return [
        Send(tracked.holder, SetPredictedLength(tracked.request.request_id, tracked.attempt, expected_len(tracked)))
    ]
