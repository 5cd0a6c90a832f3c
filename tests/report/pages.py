"""A parser that checks a page as a browser would read it."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

VOID = {"meta", "br", "input", "img", "link", "hr", "wbr"}
LOADING = {"src", "srcset", "data", "poster", "action", "formaction", "background", "xlink:href"}
"""Attributes whose address a browser may load."""


class Page(HTMLParser):
    """The elements, texts and addresses of a page; fails where its elements are not nested."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.styles = ""
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.styles += data
        else:
            self.text += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def values(self, attribute: str) -> list[str]:
        return [str(given[attribute]) for _, given in self.elements if attribute in given]


def check(source: str | Path) -> Page:
    """Return the page of a text or file; fails where it is not well-formed, or would load anything.

    The links of a file may name other files by relative paths.
    """
    page = Page(source if isinstance(source, str) else source.read_text())
    assert not page.tags & {"script", "iframe", "object", "embed", "base", "link", "img", "form"}
    used = {name for _, given in page.elements for name in given}
    assert not used & LOADING
    assert not {name for name in used if name.startswith("on")}
    ids = page.values("id")
    assert len(set(ids)) == len(ids)
    away = [link for link in page.values("href") if link[0] != "#" or link[1:] not in ids]
    assert isinstance(source, Path) or not away
    assert [one for one in away if not (Path(source).parent / unquote(one)).is_file()] == []
    assert "@import" not in page.styles
    assert not any("url(" in style for style in (page.styles, *page.values("style")))
    policy = [g["content"] for t, g in page.elements if t == "meta" and "http-equiv" in g]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    return page
