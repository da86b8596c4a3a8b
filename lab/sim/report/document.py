"""A self-contained HTML document: head, style for light and dark, figures, tables."""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from lab.sim.report.svg import element
from lab.sim.report.tables import Table

# Okabe and Ito's colours, which colour-blind people tell apart; darker on white, lighter on black.
_LIGHT = ("#0072b2", "#c94f00", "#008060", "#a64d84", "#8a6d00", "#3b8fc4", "#5a5a5a", "#7a4ec2")
_DARK = ("#56b4e9", "#ff8c42", "#2fc49a", "#e59bc6", "#e8c14a", "#9ad4f5", "#b8b8b8", "#b79cf0")
_STYLE = """
:root { color-scheme: light dark; --page: #f6f5f1; --card: #fff; --ink: #1f2328; --soft: #59636b; --line: #dedcd4;
  --track: #eceae4; --blocks: #8b9aa6; --k0: #c94f00; --k1: #8a6d00; --k2: #0072b2; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #15181b; --card: #1e2226; --ink: #e7e9ea; --soft: #a3adb4;
  --line: #363d43; --track: #2a3035; --blocks: #6d7a85; --k0: #ff8c42; --k1: #e8c14a; --k2: #56b4e9; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .75rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .25rem; }
h3 { font-size: .95rem; margin: 1rem 0 .25rem; font-weight: 600; } p { margin: .25rem 0 .75rem; max-width: 50rem; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; font-size: .875rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
figure.wide { margin-bottom: .75rem; overflow-x: auto; } figure.wide svg { min-width: 40rem; }
svg { display: block; width: 100%; height: auto; } .legend svg { width: 26px; height: 14px; flex: none; }
text { font: 12px system-ui, sans-serif; fill: var(--soft); } text.name { fill: var(--ink); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.curve { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.mark, .bar { fill: currentColor; } .track { fill: var(--track); } .blocks { fill: var(--blocks); }
.k0 { fill: var(--k0); } .k1 { fill: var(--k1); } .k2 { fill: var(--k2); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.25rem; padding: 0; margin: .5rem 0; list-style: none;
  font-size: .875rem; } .legend li { display: flex; align-items: center; gap: .4rem; }
.box { width: 14px; height: 14px; border-radius: 2px; }
.k0.box { background: var(--k0); } .k1.box { background: var(--k1); } .k2.box { background: var(--k2); }
.none.box { background: var(--track); border: 1px solid var(--soft); }
fieldset { border: 0; padding: .6rem 0; margin: 0; position: sticky; top: 0; background: var(--page); display: flex;
  flex-wrap: wrap; gap: .25rem 1rem; align-items: center; z-index: 1; } legend { float: left; margin-right: 1rem; }
label { display: inline-flex; gap: .3rem; align-items: center; cursor: pointer; }
:focus-visible { outline: 2px solid var(--s0); outline-offset: 2px; }
details { margin: .5rem 0 1rem; } summary { cursor: pointer; font-size: .875rem; color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .8125rem; margin-top: .4rem; }
th, td { text-align: right; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; } th { font-weight: 600; } .word { text-align: left; }
@media print { fieldset { display: none; } [hidden] { display: block !important; } figure { break-inside: avoid; } }
"""


def document(title: str, content: str, script: str = "", more_style: str = "") -> str:
    """Render a whole document; it loads nothing, and its content security policy forbids loading.

    `content` is markup; `title` is escaped; `more_style` follows the style of every document.
    """
    style, shown_title = _styled() + more_style, escape(title)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown_title}</title><style>{style}</style>"
    )
    body = f"<main><h1>{shown_title}</h1>{content}</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}<script>{script}</script></body></html>\n'


def _styled() -> str:
    def variables(colours: Sequence[str]) -> str:
        return " ".join(f"--s{number}: {colour};" for number, colour in enumerate(colours))

    classes = "".join(f".s{number} {{ color: var(--s{number}); }}\n" for number in range(len(_LIGHT)))
    return _STYLE.replace("LIGHT", variables(_LIGHT)).replace("DARK", variables(_DARK)) + classes


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def named_values(rows: Sequence[tuple[str, str]]) -> str:
    """Render names and their values."""
    return element("dl", *(element("dt", escape(name)) + element("dd", escape(value)) for name, value in rows))


def figure(picture: str, caption: str = "", is_wide: bool = False) -> str:
    """Render a picture with its caption."""
    words = element("figcaption", escape(caption)) if caption else ""
    return element("figure", words, picture, class_="wide" if is_wide else "plot")


def table(content: Table, caption: str, *, is_open: bool = False) -> str:
    """Render a table that can be unfolded."""

    def cell(name: str, column: int, words: str) -> str:
        kind = {"class_": "word"} if column < content.num_names else {}
        scope = {"scope": "col"} if name == "th" else {}
        return element(name, escape(words), **kind, **scope)

    head = element("tr", *(cell("th", column, words) for column, words in enumerate(content.headings)))
    rows = [element("tr", *(cell("td", column, words) for column, words in enumerate(row))) for row in content.rows]
    whole = element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll")
    return element("details", element("summary", escape(caption)), whole, **({"open": ""} if is_open else {}))
