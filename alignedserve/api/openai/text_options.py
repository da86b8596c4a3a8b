"""Options of an answer's text."""

from typing import NamedTuple


class TextOptions(NamedTuple):
    """What the text of an answer shows beside its content."""

    shows_stop: bool = False  # the stop string, or the end token where it has text
    shows_special_tokens: bool = False
