"""Notes of a room about its requests, kept until the next tick and then sent to the gateways that have them."""

from alignedserve.messages.request_notes import MAX_NOTES, RequestNote, RequestsNoted

_MAX_PENDING = 16 * MAX_NOTES  # for one gateway; a room that notes more between two ticks is not understood by them


class NoteBuffer:
    """Notes by the address of their gateway."""

    def __init__(self) -> None:
        self._pending: dict[str, list[RequestNote]] = {}

    def add(self, address: str, note: RequestNote) -> None:
        """Keep a note; dropped where there are too many."""
        notes = self._pending.setdefault(address, [])
        if len(notes) < _MAX_PENDING:
            notes.append(note)

    def take(self) -> list[tuple[str, RequestsNoted]]:
        """Return all notes, and keep none."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, {}
        return [
            (address, RequestsNoted(tuple(notes[first : first + MAX_NOTES])))
            for address, notes in pending.items()
            for first in range(0, len(notes), MAX_NOTES)
        ]
