"""Visits the built site as a reader does: `python tests/docs/visit.py site`, which needs playwright and Chromium.

The playground, line by line, legal and illegal, and from an address; exercises, solved in their pages; search; and each
page on a phone: all that folds is opened, every slider moved and every button pressed, forms are answered, no script
fails, and nothing is wider than the screen. With `--links`, which needs neither, it looks at every link instead: each
inside the site must lead to a page and, behind a #, to something there; nothing may be loaded from elsewhere.
"""

import argparse
import functools
import http.server
import shutil
import sys
import threading
import time
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Reader(HTMLParser):
    """A page's ids, its links, and what it loads."""

    def __init__(self, file: Path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
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


ANSWERS = Path(__file__).parents[1] / "exercise" / "answers"
SOLVED = ("01_intensity", "03_bytes", "03_products", "05_1f1b", "07_kv_cache")
LEGAL, RULE = "legal", "rule:"
LINES = [
    ("check", {"call": "all_gather", "line": "A[I_X, J] -> A[I, J]"}, LEGAL),
    ("check", {"call": "all_gather", "line": "A[I, J] -> A[I_X, J]"}, RULE),
    ("check", {"call": "reduce_scatter", "line": "A[I, J] {U_X} -> A[I_X, J]"}, LEGAL),
    ("check", {"call": "reduce_scatter", "line": "A[I, J] -> A[I_X, J]"}, RULE),
    ("check", {"call": "all_reduce", "line": "A[I, J] {U_X} -> A[I, J]"}, LEGAL),
    ("check", {"call": "all_to_all", "line": "A[I_X, J] -> A[I, J_X]"}, LEGAL),
    ("check", {"call": "all_to_all", "line": "A[I_X, J] -> A[I_Y, J]"}, RULE),
    ("check", {"call": "einsum", "line": "A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}"}, LEGAL),
    ("check", {"call": "einsum", "line": "A[I, J_X] * B[J_X, K] -> C[I, K]"}, RULE),
    ("check", {"call": "einsum", "line": "A[I_X, J_X] * B[J, K] -> C[I, K]"}, "used twice"),
    ("derive", {"line": "In[B_X, D] * W[D_X, F] -> Out[B_X, F]"}, "ReduceScatter_X"),
    ("schedule", {"name": "gpipe", "stages": "3", "microbatches": "6"}, "rank 2"),
    ("memory", {"model": "llama3-8b", "mesh": "X=8", "zero": "1"}, "8,030,261,248"),
]


ANSWERED = "output => output.innerHTML && !output.textContent.startsWith('Python is')"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        """A page that is left before all of it came is no fault."""


def ask(page, form: str, fields: dict[str, str]) -> str:
    """Fill a form's fields, press its button, and read what it says."""
    for name, value in fields.items():
        field = page.locator(f'form[data-ask="{form}"] [name="{name}"]')
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    output = page.locator(f'form[data-ask="{form}"] output')
    output.evaluate("output => { output.textContent = '' }")
    page.locator(f'form[data-ask="{form}"] button[type=submit]').click()
    page.wait_for_function("name => document.querySelector(`form[data-ask=${name}] output`).textContent", arg=form)
    return output.text_content()


def start(page, url: str) -> None:
    """Open a page, and wait until its Python is ready."""
    page.goto(url)
    page.wait_for_function("status => document.getElementById('status').textContent === status.dataset.ready",
                           arg=page.locator("#status").element_handle(), timeout=60_000)  # fmt: skip


def solve(page, base: str) -> None:
    """Answer exercises in their pages, first wrongly; the list then shows them as solved."""
    for name in SOLVED:
        answers = tomllib.loads((ANSWERS / f"{name}.toml").read_text())
        right, slip = answers["right"], answers["wrong"][0]
        start(page, f"{base}exercises/{name}.html")
        wrong = right.replace(slip["of"].strip("\n"), slip["is"].strip("\n"), 1)
        assert slip["says"] in ask(page, "exercise", {"text": wrong})
        assert ask(page, "exercise", {"text": right}).startswith("right: ")
    start(page, f"{base}exercises/{SOLVED[0]}.html")  # what was written is there again
    said = ask(page, "exercise", {"text": "while True: pass"})
    assert "did not end" in said, said
    page.goto(f"{base}exercises/index.html")
    assert page.locator("[data-solved]", has_text="solved").count() == len(SOLVED)


def press(page) -> int:
    """Open all that folds on a page, move each slider to its end, and press each button; return how many there were."""
    folded, opened = page.locator("details:not([open]) > summary:visible"), 0
    while folded.count():
        folded.first.click()
        opened += 1
    sliders = page.locator("input[type=range]:visible").all()
    for slider in sliders:
        slider.press("End")
    buttons = page.locator("button:visible").all()
    for button in buttons:
        output = button.locator("xpath=ancestor::form//output")
        if button.get_attribute("type") == "submit" and output.count():
            output.evaluate("output => { output.textContent = '' }")
            button.click()  # waits until Python has started, if the button does
            page.wait_for_function(ANSWERED, arg=output.element_handle(), timeout=60_000)
        else:
            button.click()
    return opened + len(sliders) + len(buttons)


def visit(page, base: str, site: Path, shots: Path | None) -> None:
    urls, errors = [], []
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    began = time.monotonic()
    start(page, base + "playground.html")
    print(f"the playground was ready after {time.monotonic() - began:.1f} s")
    for form, fields, expected in LINES:
        said = ask(page, form, fields)
        assert expected in said, (form, fields, said)
        assert (expected == RULE) == (RULE in said), said
    page.fill('form[data-ask="check"] [name="line"]', "A[I_X] * B[I_X] -> C[I_X]")
    page.wait_for_function("location.hash.includes('C%5BI_X%5D')")
    sent = page.url
    page.goto("about:blank")
    start(page, sent)
    page.wait_for_function(
        "document.querySelector('form[data-ask=check] output').textContent.includes('legal: A[I_X]')"
    )
    page.wait_for_function("document.querySelectorAll('form[data-ask=schedule] svg rect').length > 64")
    solve(page, base)
    page.goto(base + "search.html?q=ReduceScatter")
    page.wait_for_selector("#search-results li", timeout=20_000)
    page.set_viewport_size({"width": 390, "height": 844})
    pressed = 0
    for file in sorted(site.rglob("*.html")):
        name = file.relative_to(site).as_posix()
        page.goto(base + name)
        pressed += press(page)
        assert not errors, (name, errors)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} is wider than a phone"
        if shots and name in ("index.html", "questions.html", "playground.html", "chapters/05_fsdp.html"):
            page.screenshot(path=shots / f"{file.stem}-phone.png")
    elsewhere = [url for url in urls if not url.startswith((base, "data:"))]
    assert not elsewhere, elsewhere
    print(f"{pressed:,} things opened, moved and pressed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, help="a folder for pictures of some pages")
    parser.add_argument("--links", action="store_true", help="look at links alone, without a browser")
    args = parser.parse_args()
    if args.links:
        wrong, count = faults(args.site)
        print("\n".join([*wrong, f"{count:,} links inside the site, {len(wrong)} faults"]))
        return int(bool(wrong))
    from playwright.sync_api import sync_playwright

    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=str(args.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        visit(browser.new_page(), f"http://127.0.0.1:{server.server_port}/", args.site, args.shots)
        browser.close()
    print(f"{len(LINES)} lines played, {len(SOLVED)} exercises solved, every page as narrow as a phone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
