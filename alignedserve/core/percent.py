"""Shares in percent, for people to read."""

_MOST_DIGITS = 8  # what differs less from a whole is what sums of floats leave


def in_percent(share: float, digits: int = 1) -> str:
    """Format a share, with as many more digits as keep one that is not whole from reading as whole, or as none."""
    for more in range(digits, _MOST_DIGITS + 1):
        words = f"{share:.{more}%}"
        if not 0.0 < share < 1.0 or float(words.removesuffix("%")) not in {0.0, 100.0}:
            return words
    return f"{share:.{digits}%}"
