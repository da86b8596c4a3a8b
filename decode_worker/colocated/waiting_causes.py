"""Why requests of a colocated worker are not in its latest iteration."""

from collections.abc import Collection

from alignedserve.messages.request_notes import Cause
from alignedserve.worker_core.request_notes import WaitingRequest
from decode_worker.held_requests import HeldRequest, HeldRequests


def causes_of(held: HeldRequests, members: Collection[HeldRequest], max_running: int) -> list[WaitingRequest]:
    """Return the waiting requests. `members`: of the latest iteration, `max_running` at most."""
    computing = {member.request.request_id for member in members}
    num_running = len(computing)
    waiting = [waiter for waiter in held if waiter.request.request_id not in computing and not waiter.is_finished]
    is_full = num_running >= max_running
    return [
        WaitingRequest(waiter.request.request_id, _cause_of(waiter, held, is_full), num_running) for waiter in waiting
    ]


def _cause_of(one: HeldRequest, held: HeldRequests, is_full: bool) -> Cause:
    if is_full:
        return Cause.BATCH_FULL
    num_missing = held.blocks_for(one.context_len) - len(one.block_ids)
    return Cause.BLOCKS_SHORT if held.state.num_free < num_missing else Cause.OTHERS_FIRST
