"""Looks at every link of the built site: `python tests/docs/links.py site`.

Each link inside it must lead to a page and, behind a #, to something there; nothing may be loaded from elsewhere.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Reader(HTMLParser):
    """A page's ids, its links, and what it loads."""

    def __init__(self, file: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif tag == "a" and name == "href":
                self.links.append(value)
            elif (tag, name) in LOADED and ("rel", "canonical") not in attrs:
                self.loaded.append(value)


def faults(site: Path) -> tuple[list[str], int]:
    """What is wrong, and how many links were looked at."""
    pages = {file.resolve(): Reader(file) for file in sorted(site.rglob("*.html"))}
    found, count = [], 0
    for file, page in pages.items():
        where = file.relative_to(site.resolve())
        found += [f"{where} loads {url}" for url in page.loaded if urlsplit(url).scheme not in ("", "data")]
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            count += 1
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if not target.exists():
                found.append(f"{where}: {link} leads nowhere")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                found.append(f"{where}: {link} leads to nothing on that page")
    return found, count


if __name__ == "__main__":
    wrong, links = faults(Path(sys.argv[1]))
    print("\n".join([*wrong, f"{links:,} links inside the site, {len(wrong)} faults"]))
    sys.exit(bool(wrong))
