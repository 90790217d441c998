"""Links between README, changelog, documentation and files of the repository, as GitHub follows them."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1|^    .*?$|(`+)(?!`).*?(?<!`)\2(?!`)", flags=re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.*?) *$", flags=re.MULTILINE)


def links(page):
    return LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))


def anchors(page):
    """Return the anchors that GitHub gives a page's headings."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = {}
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{number}" if number else slug for slug, last in found.items() for number in range(last + 1)}


def has_anchor(page, anchor):
    # Generated pages exist only on the site, where Sphinx checks them.
    return anchor in anchors(page) or "\n<!-- generated: " in page.read_text(encoding="utf-8")


def missing(page):
    """Return links of a page without a target."""
    wrong = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and not has_anchor(target, anchor)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page):
    assert missing(page) == []


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, twice\n\n## Twice\n\n## Twice\n\n"
        "[a](#a-title-twice) [b](#twice-1) [c](page.md) [d](https://example.com/)\n"
        "`[code](nowhere.md)`\n\n```\n[code](nowhere.md)\n```\n\n"
        "[e](#nowhere) [f](nowhere.md) ![g](nowhere.svg) [h](page.md#twice-2) [i](../outside.md)\n"
    )
    assert missing(page) == ["#nowhere", "nowhere.md", "nowhere.svg", "page.md#twice-2", "../outside.md"]


def test_every_documentation_page_is_checked():
    assert {"README.md", "CHANGELOG.md", "docs/method.md", "docs/how-to/load.md"} <= {
        str(page.relative_to(ROOT)) for page in PAGES
    }
