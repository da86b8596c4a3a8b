"""Finds the end of a JSON value in text that comes character by character."""

_OPENING, _CLOSING = "{[", "}]"
_ENDS_SCALAR = ",}] \t\r\n"


class JsonValueScanner:
    """Says of each character whether it belongs to the value, and after it whether the value is complete."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_scalar = False  # a number or a word, which only the next character ends

    def takes(self, character: str) -> bool:
        """Return whether the next character belongs to the value."""
        if self._is_in_string:
            self._continue_string(character)
        elif self._is_scalar and self._depth == 0:
            self.is_complete = character in _ENDS_SCALAR
            return not self.is_complete
        elif character == '"':
            self._is_in_string = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            self.is_complete = self._depth == 0
        else:
            self._is_scalar = self._depth == 0
        return True

    def _continue_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            self.is_complete = self._depth == 0
