"""Stop strings against a reference that looks at every prefix of the whole text."""

import random

from alignedserve.gateway.openai.stop_strings import StopStringFinder


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    for length in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            return text[: length - max(map(len, ending))], True
    return text, False


def test_where_pieces_are_cut_makes_no_difference() -> None:
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randrange(1, 14)))
        stops = ["".join(draw.choices("abc", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 4))]
        shown, is_found = reference(text, stops)
        finder, got, rest = StopStringFinder(stops), "", text
        while rest and not finder.is_found:
            size = draw.randrange(1, 5)
            got += finder.push(rest[:size])
            rest = rest[size:]
            assert shown.startswith(got)  # never more than may be shown
        got += "" if finder.is_found else finder.flush()
        assert (got, finder.is_found) == (shown, is_found), (text, stops)
