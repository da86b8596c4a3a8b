"""Limits of what a grammar may cost: compiled, and per token."""

from llguidance import LLParserLimits

# The work that they bound takes about 40 ms to compile and 15 ms for a mask; schemas in use stay below 5 % of them.
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    verbose_errors=False,  # errors are shown to clients and logged: they repeat no content
)
