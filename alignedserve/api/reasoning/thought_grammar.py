"""Lets a thought stand before what an answer must match, and bounds it."""

from collections.abc import Callable

from alignedserve.api.reasoning.formats import ReasoningFormat, ThoughtStart


def thought_symbol(start: ThoughtStart, *, is_bounded: bool) -> str:
    """Return what the answer begins with; empty: with no thought."""
    if start is ThoughtStart.CLOSED:
        return ""
    if start is ThoughtStart.OPEN:
        return "thought"
    # A bound would be worth nothing if the same text could count as no thought.
    return "open thought" if is_bounded else "(open thought)?"


def thought_rules(form: ReasoningFormat, literal: Callable[[str], str], budget: int | None) -> str:
    """Return the rules of `open`, the mark that begins a thought, and `thought`, from after it to its end mark."""
    begin, end = literal(form.begin), literal(form.end)
    rules = [f"open{lazy(begin)}: {begin}"]
    if budget is None:
        return "\n".join([*rules, f"thought{lazy(end)}: TEXT {end}"])
    if budget == 0:
        return "\n".join([*rules, f"thought: {end}"])
    rules.append(f"cut[max_tokens={budget}]: TEXT")
    if not lazy(end):
        return "\n".join([*rules, f"thought: cut {end}"])
    # When both are used up it is the first that goes on.
    return "\n".join([*rules, f"thought: cut {end} | whole", f"whole[lazy, max_tokens={budget}]: TEXT {end}"])


def lazy(literal: str) -> str:
    """Return the attribute of a rule that ends in this mark: one written as text ends the text before it at once."""
    return "" if literal.startswith("<[") else "[lazy]"
