"""Private-use characters that say of a text what no client and no model can spell out."""

import re

# Put around control tokens that a message spells out, so that they are encoded as plain text, and around those that an
# answer's text shows, so that its parser can tell them from text.
MARK_START, MARK_END = "\U000f0000", "\U000f0001"
# Put behind the text of a message that is left open. The blank behind it, which no template writes, is gone where a
# template trims its messages.
OPEN_MARK, OPEN_BLANK = "\U000f0002", "\u2003"

_MARKED = re.compile(f"{MARK_START}([^{MARK_END}]*){MARK_END}")


def control_mark(content: str) -> str:
    """Return a control token's name as no text can spell it."""
    return f"{MARK_START}{content}{MARK_END}"


def without_marks(text: str) -> str:
    return text.replace(MARK_START, "").replace(MARK_END, "").replace(OPEN_MARK, "")


def split_marked(text: str) -> list[str]:
    """Return the text in pieces: text at even places, names of control tokens from their `control_mark` at odd ones."""
    return _MARKED.split(text)
