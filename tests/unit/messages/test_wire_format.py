"""Messages are plain MessagePack: any implementation reads them, and what it writes is read here."""

import msgpack

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason
from alignedserve.messages.gateways import TokenDelta, TokensEmitted
from alignedserve.messages.links import GatewayInbound
from alignedserve.messages.wire import Codec


def test_another_implementation_reads_and_writes_our_messages() -> None:
    codec = Codec(GatewayInbound)
    message = TokensEmitted((TokenDelta(RequestId("r"), 3, (7, 8), (), FinishReason.STOP),))
    payload = codec.encode(message)
    assert msgpack.unpackb(payload) == ["TokensEmitted", [["r", 3, [7, 8], [], "stop", 0, b""]]]
    assert codec.decode(msgpack.packb(["TokensEmitted", [["r", 3, [7, 8], [], "stop"]]])) == message
