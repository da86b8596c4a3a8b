"""Write the tables of docs/experiments from the records.

    python -m experiments.pages

A table, or a list, stands behind a line `<!-- table: NAME -->`.
tests/unit/docs/test_experiment_tables.py holds pages and records together.
"""

from benchmarks.measuring.arguments import parser_of
from experiments.pages.index import PAGES, page_path, with_tables


def main() -> None:
    """Write every page's tables anew; say which pages have changed."""
    parser_of(__doc__).parse_args()
    for page in PAGES:
        path = page_path(page)
        before = path.read_text()
        after = with_tables(before, PAGES[page])
        if after != before:
            path.write_text(after)
            print(path)


if __name__ == "__main__":
    main()
