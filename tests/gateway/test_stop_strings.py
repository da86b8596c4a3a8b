"""Stop strings against a reference that looks at every prefix of the whole text."""

import random

from alignedserve.gateway.openai.stop_strings import StopStringFinder


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for length in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: length - len(found)], found
    return text, None


def test_where_pieces_are_cut_makes_no_difference() -> None:
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randrange(1, 14)))
        stops = ["".join(draw.choices("abc", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 4))]
        shown, found = reference(text, stops)
        finder, got, rest = StopStringFinder(stops), "", text
        while rest and finder.found is None:
            size = draw.randrange(1, 5)
            got += finder.push(rest[:size])
            rest = rest[size:]
            assert shown.startswith(got)  # never more than may be shown
        got += "" if finder.found is not None else finder.flush()
        assert (got, finder.found) == (shown, found), (text, stops)
