"""The style sheet of the pages. The colours are those of Okabe and Ito, which people with any kind
of colour vision tell apart; a letter says the same once more."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MARKS", "STYLE"]

_COLOURS: Mapping[str, tuple[str, str, str]] = {
    "rows": ("R", "#0072b2", "#dcebf6"),
    "headers": ("H", "#8a5a00", "#fdf0d0"),
    "fences": ("F", "#b03a00", "#fbe0d2"),
    "engine": ("E", "#006b4d", "#d5f0e6"),
    "atomics": ("A", "#93396f", "#f5e0ec"),
    "block": ("B", "#555555", "#eeeeee"),
}
"""Kind → its letter, ink and paper."""

MARKS: Mapping[str, str] = {kind: mark for kind, (mark, _, _) in _COLOURS.items()}
"""Kind → letter."""

_BASE = """
:root{--ink:#1b1b1b;--grey:#666;--edge:#ddd}
*{box-sizing:border-box}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);margin:0;background:#fff}
header,main,body>details{padding:0 1.2em}
h1{font-size:1.5em;margin:.5em 0}h1 small,summary small{font-weight:400;color:var(--grey)}
a{color:#0b57a4;text-decoration:none}a:hover{text-decoration:underline}
code,pre{font:12px/1.4 ui-monospace,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
summary{cursor:pointer}
body>input{position:absolute;opacity:0;pointer-events:none}
nav.pages{padding-top:.6em}
dl{display:flex;flex-wrap:wrap;gap:.3em 2em;margin:.4em 0}dt{color:var(--grey)}
dd{margin:0;font-weight:600}
.warn{background:#fdf0d0;padding:.4em .8em;border-left:4px solid #e69f00}
table{border-collapse:collapse}td,th{padding:.15em .7em .15em 0;text-align:left;vertical-align:top}
td.n{text-align:right;white-space:nowrap}
td.bar{width:16em}td.bar i{display:block;height:.8em;margin-top:.35em;background:#7a9cbf}
nav.legend{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:.5em;align-items:center;
background:#fff;border-bottom:1px solid var(--edge);padding:.5em 1.2em}
.c{display:inline-block;padding:0 .5em;border-radius:3px;border:1px solid var(--edge)}
label.c{cursor:pointer}
.notes table{font-size:13px}.notes td{border-top:1px solid var(--edge)}
.file{border-top:2px solid var(--ink);margin-top:1.2em}
.file>summary{font-weight:600;padding:.3em 0}
.line{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,6fr) minmax(0,3fr);gap:.8em;
border-top:1px solid #f1f1f1}
.line:target{outline:2px solid #0072b2}
.src{display:grid;grid-template-columns:3.2em minmax(0,1fr);align-content:start}
.src>a{color:#999;text-align:right;padding-right:.8em;font-size:12px}
.src>code{white-space:pre-wrap;overflow-wrap:anywhere}
.chips{grid-column:2;font-size:11px}.chips a{margin:1px 4px 1px 0;border-width:0 0 0 4px}
.out{font-size:12px}.out summary{color:var(--grey)}
.two{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:.8em;margin:.15em 0 .4em}
.two pre:only-child{grid-column:1/3}
.two pre{max-height:20em;overflow:auto}.two b{font-weight:600}
.chain{margin:.2em 0 0;color:var(--grey);font-size:11px}
.margin{font-size:12px;color:#333}.margin p{margin:0 0 .3em}
.margin code{font-weight:600;overflow-wrap:anywhere}
q{display:block;font-style:italic;color:#444;border-left:3px solid var(--edge);padding-left:.6em}
table.index td,table.index th{border-top:1px solid var(--edge);white-space:nowrap}
.add{background:#dcebf6}.del{background:#fbe0d2}
#show-any:checked~main .line:not(.m){display:none}
@media(max-width:900px){.line{grid-template-columns:minmax(0,1fr)}}
"""


def _style() -> str:
    rows = [" ".join(_BASE.split("\n"))]
    for kind, (_, ink, paper) in _COLOURS.items():
        rows.append(
            f"b.{kind},.c.{kind}{{color:{ink};background:{paper};border-color:{ink}}}"
            f"#show-{kind}:checked~main .line:not(.k-{kind}){{display:none}}"
        )
    for kind in ("all", "any", *_COLOURS):
        rows.append(
            f"#show-{kind}:checked~nav label[for=show-{kind}]"
            "{box-shadow:0 0 0 2px var(--ink);font-weight:600}"
            f"#show-{kind}:focus-visible~nav label[for=show-{kind}]{{outline:3px solid #0b57a4}}"
        )
    return "".join(rows)


STYLE = _style()
"""All of it."""
