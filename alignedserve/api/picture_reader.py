"""Reads pictures of clients by the plugin `vision`, which is loaded when the first one comes."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from alignedserve.api.conversation import Conversation
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.core.picture import Picture
from alignedserve.core.plugins import load_plugin
from alignedserve.core.seeing import PictureForm


class ReadPictures(Protocol):
    """The pictures of a conversation, each decoded once."""

    @property
    def texts(self) -> Sequence[str]:
        """Return what stands for each picture in the prompt."""

    def placed(self, token_ids: Sequence[int], param: str) -> tuple[Picture, ...]:
        """Return the pictures at their places in the prompt; `param`: the field of the conversation. Raises
        InvalidRequest unless each picture token has its picture."""


class PictureReader:
    """What all models of a gateway share."""

    def __init__(self, *, fetches: bool = True) -> None:
        """`fetches`: False: pictures that have a URL are for the gateway itself."""
        self._fetches = fetches

    @cached_property
    def plugin(self) -> Any:
        """The plugin's part: `read`, as below, and `close`. Raises ConfigError."""
        return load_plugin("vision").gateway_pictures(fetches=self._fetches)

    async def read(
        self, conversation: Conversation, form: PictureForm | None, config: GatewayConfig, lanes: WorkLanes
    ) -> ReadPictures | None:
        """Return the pictures of a conversation, for a model that sees in this form; None: it has none. Raises
        InvalidRequest naming the field: of a model that does not see, of a server without the plugin, of too many or
        too large pictures, of URLs that carry no picture or lead where none is fetched from, of files that cannot be
        decoded. Raises also Unfetched, Overloaded, NeedsGateway."""
        named = [picture for message in conversation.messages for picture in message.pictures]
        if not named:
            return None
        at = named[0].kind_path
        try:
            plugin = self.plugin
        except ConfigError as error:
            message = f"{at}: this server reads no pictures: {error}."
            raise InvalidRequest(message, param=at, code="unsupported_parameter") from error
        if form is None:
            message = f"{at}: this model does not see pictures."
            raise InvalidRequest(message, param=at, code="unsupported_parameter")
        read: ReadPictures = await plugin.read(named, conversation.names.messages, form, config, lanes)
        return read

    def close(self) -> None:
        """End the process and the thread of the plugin. May be repeated."""
        if "plugin" in self.__dict__:
            self.plugin.close()
