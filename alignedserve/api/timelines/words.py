"""What steps and causes are called where people read them."""

from alignedserve.api.timelines.timeline import SourcedNote
from alignedserve.messages.request_notes import Cause, RequestNote, Step

# With the fields of a note by their names.
_STEPS = {
    Step.RECEIVED: "received",
    Step.SUBMITTED: "tokenised and sent to the router",
    Step.FIRST_TOKEN: "first token sent to the client",
    Step.RESUMED: "sent to the router again, with the tokens that the client has",
    Step.ENDED: "ended after {num_tokens} tokens",
    Step.QUEUED: "queued: {num_requests} before it, {num_tokens} tokens of other prompts wait",
    Step.WAITING: "still waiting",
    Step.DISPATCHED: "given to {peer}: {num_tokens} tokens of context, an answer of about {predicted_len} expected",
    Step.PREDICTED: "length of the answer predicted: {predicted_len}",
    Step.POOLED: "in {peer} with {num_tokens} tokens of context",
    Step.GRANTED: "granted to {peer} in a batch of {num_requests}",
    Step.MOVE_ORDERED: "to be moved to {peer}",
    Step.MOVED: "moved to {peer} after {num_tokens} tokens",
    Step.STAYED: "not moved: it goes on at {peer}",
    Step.PREEMPTED: "sent back to the queue by {peer} after {num_tokens} tokens",
    Step.INTERRUPTED: "taken from its worker",
    Step.ACCEPTED: "accepted with {num_tokens} tokens of context; other requests here: {num_requests}",
    Step.STARTED: "computing begins: {num_tokens} tokens cached already, in an iteration of {num_requests}",
    Step.PREFILLED: "prompt computed ({num_tokens} tokens), first token sampled",
    Step.OFFERED: "asks {peer} for blocks",
    Step.HANDED_OVER: "cache written to {peer}",
    Step.HANDOFF_REFUSED: "{peer} took nothing",
    Step.ARRIVED: "candidate in a batch of {num_requests}, from {peer}",
    Step.PREFETCHING: "prefetch into the memory of {peer} begins",
    Step.PREFETCHED: "prefetched into the memory of {peer}",
    Step.PREFETCH_ENDED: "prefetch ended without a copy",
    Step.LOADING: "cache copied in from {peer}",
    Step.JOINED: "in the running batch{of_requests}",
    Step.EVICTED: "evicted",
    Step.SWAPPED_OUT: "cache of {num_tokens} tokens swapped out to host memory",
    Step.SWAPPED_IN: "cache of {num_tokens} tokens swapped in again",
    Step.RETURNED: "returned to the pool by way of {peer}",
    Step.FINISHED: "last of {num_tokens} tokens: {num_iterations} iterations of {num_requests} on average",
    Step.ATTEMPT_FAILED: "this attempt failed",
}
_CAUSES = {
    Cause.NO_WORKER: "no worker takes prompts",
    Cause.WORKERS_BUSY: "every worker had as many prompt tokens to compute as it may be given",
    Cause.POOL_FULL: "the pool had no free blocks",
    Cause.OTHERS_FIRST: "requests of higher class or priority, or with less slack, had the iterations",
    Cause.BLOCKS_SHORT: "too few cache blocks were free",
    Cause.BATCH_FULL: "as many requests ran as may run together",
    Cause.BATCH_NOT_FULL: "too few requests of similar length for an aligned batch",
    Cause.NO_SLOT: "every decode worker had all the requests that it takes",
    Cause.EARLIER_BATCH: "an earlier batch ran on before its own could take over",
    Cause.PREFETCH: "its cache was on its way",
    Cause.PREFIX: "its prefix was on its way from a pool",
    Cause.BLOCKS_HELD: "blocks were held for requests that move",
    Cause.ITERATION: "the iteration that ran had to end first",
    Cause.COPY: "its cache was being handed over",
    Cause.MEMORY: "others needed its cache blocks",
    Cause.REFUSED: "its cache did not verify, or found no room",
    Cause.WORKER_LOST: "its worker was lost",
    Cause.DRAINED: "its worker drains",
    Cause.URGENT: "urgent: past the pool, straight to a decode worker",
    Cause.CLIENT_GONE: "the client was gone",
    Cause.FAILED: "it failed",
    Cause.REJECTED: "it was rejected",
    Cause.STOP_STRING: "a stop string came",
}


def step_text(one: SourcedNote) -> str:
    """Return a step in words."""
    note = one.note
    predicted_len = "an unknown number" if note.predicted_len is None else f"{note.predicted_len:.0f}"
    return _STEPS[note.step].format(
        peer=note.peer or "another process",
        num_tokens=note.num_tokens,
        num_requests=note.num_requests,
        num_iterations=note.num_iterations,
        predicted_len=predicted_len,
        of_requests=_of_requests(note),
    )


def cause_text(cause: Cause) -> str:
    """Return a cause in words."""
    return _CAUSES[cause]


def _of_requests(note: RequestNote) -> str:
    return f" of {note.num_requests}" if note.num_requests else ""
