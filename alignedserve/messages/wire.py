"""Encoding of messages: MessagePack, tagged by name, one closed union per receiver.

Every message is a frozen struct sent as an array whose first element is its tag. A tag outside the receiver's union,
a wrong type or a value out of bounds is refused by name; nothing is ever looked up in a namespace or executed.
"""

import msgspec

from alignedserve.core.errors import ProtocolError

PROTOCOL_VERSION = 28
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that crosses a link."""


class Codec:
    """Encodes any message and decodes those of one union."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)

    def encode(self, message: Message) -> bytes:
        """Encode one message, without framing."""
        return self._encoder.encode(message)

    def decode(self, payload: bytes) -> Message:
        """Decode one message. Raises ProtocolError, which names what is wrong and echoes no content."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"message refused: {type(error).__name__}: {str(error)[:200]}") from error
