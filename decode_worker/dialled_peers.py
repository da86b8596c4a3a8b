"""The prefill workers to which a decode worker keeps links, as the router announces them."""

from alignedserve.messages.events import Dial, StopDialling
from alignedserve.messages.workers import PeersChanged


class DialledPeers:
    """Names that are being dialled, in the order in which they were announced."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def changed(self, message: PeersChanged) -> list[Dial | StopDialling]:
        """Dial those that have joined and stop dialling those that are gone; repeated messages change nothing."""
        joined = dict.fromkeys(message.joined)
        left = [name for name in self._names if name not in joined] if message.is_complete else message.left
        commands: list[Dial | StopDialling] = []
        for name in left:
            if name in self._names and name not in joined:
                del self._names[name]
                commands.append(StopDialling(name))
        for name in joined:
            if name not in self._names:
                self._names[name] = None
                commands.append(Dial(name))
        return commands
