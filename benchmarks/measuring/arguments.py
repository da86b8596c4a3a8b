"""Arguments that the scripts share."""

import argparse


def parser_of(doc: str | None, *, rounds: int | None = None, name: str | None = None) -> argparse.ArgumentParser:
    """Make a script's parser, its docstring as the help; `rounds` and `name`: defaults of --rounds and --name."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if name is not None:
        parser.add_argument("--name", default=name, help=f"of the record below benchmarks/results; {name} by default")
    return parser
