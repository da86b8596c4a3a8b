"""Tables that stand on pages behind a line `<!-- table: NAME -->`, and are written from records or code."""

import re


def put_table(page: str, name: str, table: str) -> str:
    place = re.compile(rf"(?<=^<!-- table: {re.escape(name)} -->\n\n)(?:\|.*\n)*", re.MULTILINE)
    return place.sub(lambda _: table, page)
