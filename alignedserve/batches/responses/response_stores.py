"""Repositories of the Responses API: responses, conversations and events, over one record store."""

from typing import NamedTuple

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.responses.conversation_repository import ConversationRepository
from alignedserve.batches.responses.event_log import EventLog
from alignedserve.batches.responses.response_repository import ResponseRepository


class ResponseStores(NamedTuple):
    """Repositories that all gateways and the driver of batches share."""

    responses: ResponseRepository
    conversations: ConversationRepository
    events: EventLog


def response_stores(records: RecordStore) -> ResponseStores:
    return ResponseStores(ResponseRepository(records), ConversationRepository(records), EventLog(records))
