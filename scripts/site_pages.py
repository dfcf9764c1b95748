"""A hook of MkDocs: pages that lie outside docs/ come into the site, and links lead there.

On a code host every link is a path in the repository, and works. On the site a link to a page of
the site leads to that page; what the site does not hold (source, tests) is named without a link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ptx/README.md": "ptx.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Page in the repository → its name on the site."""
FIRST = ("index.md", "calling.md", "deepep.md", "loads_and_cache.md", "measurements.md")
"""Pages in this order, before all others."""
LAST = ("api.md", "contributing.md", "security.md", "changelog.md")
_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages from outside."""
    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=turn_links(text, source)))
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    """Order the pages."""

    def place(item: Any) -> tuple[int, str]:
        name = item.file.src_uri if item.is_page else ""
        known = {each: i for i, each in enumerate(FIRST)} | {e: 100 + i for i, e in enumerate(LAST)}
        return known.get(name, 50), name

    nav.items.sort(key=place)
    pages = sorted(nav.pages, key=place)
    for before, page, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
        page.previous_page, page.next_page = before, after
    return nav


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page of docs/."""
    if page.file.src_uri in OUTSIDE.values():
        return markdown
    return turn_links(markdown, f"docs/{page.file.src_uri}")


def turn_links(text: str, source: str) -> str:
    """The text of a page of the repository with links as the site has them."""

    def turned(match: re.Match[str]) -> str:
        mark, words, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        words = _LINK.sub(turned, words)  # a picture in a link
        path, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        name = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not name or not (ROOT / path).is_file():
            return words
        return f"{mark}[{words}]({name}{'#' + anchor if anchor else ''})"

    parts, at = [], 0
    for block in _FENCED.finditer(text):
        parts += [_LINK.sub(turned, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, _LINK.sub(turned, text[at:])])
