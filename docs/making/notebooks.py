"""Runs every chapter as a notebook and keeps it, with its outputs, where Sphinx reads it: docs/chapters/NAME.ipynb.

The answers that a chapter gives to the book's questions stand in its notebook's metadata, each with the section that
computes it. A chapter runs again when its text or the library has changed.
"""

import ast
import hashlib
import json
import os
import re
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from tried import expressions, with_answers

from scaling.book.notebook import execute, has_numbers

ADDRESS = re.compile(r"(?<![<(\w])(https://[^\s>)\"`]+[^\s>)\"`.,:;])")
CHAPTER = re.compile(r"(?<![/\w])`?(\d\d_\w+)\.py`?(?!\w)")
ALIGNED = re.compile(r"(?<=\n\n)(?: {4}.*(?:\n|\Z)){2,}(?=\n|\Z)")
PRINTS = re.compile(r"page\.|\w+ = page\.check|[\w.]+\(page\b")
ASK = """import json, dataclasses
print(json.dumps([dataclasses.asdict(a) | {"row": a.row, "verdict": a.verdict, "why": a.why} for a in page.given]))"""


def run_all(folder: Path, out: Path, jobs: int = 2) -> dict[str, nbformat.NotebookNode]:
    """The chapters in `folder` as notebooks that have run, by name; so many at a time."""
    out.mkdir(exist_ok=True)
    library = _digest([*sorted((folder.parent / "scaling").rglob("*.py")), Path(__file__)])
    chapters = sorted(folder.glob("[0-9]*.py"))
    os.environ["CHAPTER"] = "--small"
    with ProcessPoolExecutor(jobs) as pool:
        ran = pool.map(_kept, chapters, [out] * len(chapters), [library] * len(chapters))
        notebooks = dict(zip((chapter.stem for chapter in chapters), ran, strict=True))
    for stale in {file.stem for file in out.glob("*.ipynb")} - set(notebooks):
        (out / f"{stale}.ipynb").unlink()
    return notebooks


def section_target(chapter: str, section: str) -> str:
    """The name by which other pages point to a section of a chapter."""
    return f"{chapter}-" + re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")


def sections(notebook) -> list[str]:
    """The titles of a notebook's sections."""
    return [title for cell in notebook.cells if cell.cell_type == "markdown" for title in _titles(cell.source)]


def _digest(files) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _kept(chapter: Path, out: Path, library: str):
    file, key = out / f"{chapter.stem}.ipynb", library + _digest([chapter])
    if file.exists() and (kept := nbformat.read(file, 4)).metadata.get("key") == key:
        return kept
    notebook = _ran(chapter)
    notebook.metadata["key"] = key
    nbformat.write(notebook, file)
    return notebook


def _ran(chapter: Path):
    """The chapter, run: headings have targets, addresses are links, and its answers are in the metadata."""
    notebook = jupytext.read(chapter)
    if has_numbers(chapter):
        notebook.cells = [part for cell in notebook.cells for part in _asked(cell)]
    tried = notebook.cells[-1].source
    asked = expressions(tried)
    notebook.cells += [nbformat.v4.new_code_cell(f"print({code})") for code in asked]
    execute(notebook)
    found = [cell.outputs[0].text.strip() for cell in notebook.cells[len(notebook.cells) - len(asked) :]]
    notebook.cells = notebook.cells[: len(notebook.cells) - len(asked)]
    notebook.cells[-1].source = with_answers(tried, chapter.read_text(), found)
    answers, section, cells = [], "", []
    for cell in notebook.cells:
        if cell.metadata.get("asks"):
            given = json.loads(cell.outputs[0].text)
            answers += [answer | {"section": section} for answer in given[len(answers) :]]
            continue
        if cell.cell_type == "markdown":
            section = (_titles(cell.source) or [section])[-1]
            cell.source = _linked(chapter.stem, cell.source, first=not cells)
        else:
            cell.outputs = shown_outputs(cell.outputs)
            folded = is_folded(cell.source) or "hide-input" in cell.metadata.get("tags", ())
            cell.metadata["tags"] = ["hide-input"] * folded
        cells.append(cell)
    notebook.cells, notebook.metadata["answers"] = cells, answers
    return notebook


def shown_outputs(outputs: list) -> list:
    """Printed text that follows other printed text joins it; empty text goes, and the value of a cell's last line."""
    kept = []
    for out in outputs:
        if out.output_type == "stream" and kept and kept[-1].output_type == "stream" and kept[-1].name == out.name:
            kept[-1].text += out.text
        elif out.output_type != "execute_result":
            kept.append(out)
    for out in kept:
        if out.output_type == "stream":
            out.text = out.text.strip("\n") + "\n"
    return [out for out in kept if out.output_type != "stream" or out.text.strip()]


def is_folded(code: str) -> bool:
    """Return whether the page shows a cell's output and folds its code: it sets the page up, or mostly prints.

    A cell mostly prints if it defines nothing, and three fifths of its statements' lines are calls of the page.
    """
    every = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    said = [(node, ast.unparse(node)) for node in every if not hasattr(node, "body")]
    if any(text.startswith("page = Page(") for _, text in said):
        return True
    lines = [(node.end_lineno - node.lineno + 1, bool(PRINTS.match(text))) for node, text in said]
    defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in every)
    return not defines and sum(n for n, prints in lines if prints) >= 0.6 * sum(n for n, _ in lines) > 0


def _asked(cell):
    """A cell, and after one that gives answers another, which tells them."""
    if cell.cell_type == "code" and "page.answers(" in cell.source:
        return [cell, nbformat.v4.new_code_cell(ASK, metadata={"asks": True})]
    return [cell]


def _titles(text: str) -> list[str]:
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


def _linked(chapter: str, text: str, first: bool) -> str:
    """A cell's Markdown for MyST. The first is the chapter's docstring: its title is what stands before a colon."""
    if first and not text.startswith("# "):
        title, _, rest = text.partition("\n")
        named, colon, said = title.partition('": ') if '": ' in title else title.partition(": ")
        text = f"# {named}{colon.strip(': ')}\n\n{said[:1].upper()}{said[1:]}\n{rest}" if said else f"# {title}\n{rest}"
    text = "\n".join(
        line if line.startswith("    ") else CHAPTER.sub(r"[\1](\1.ipynb)", line) for line in text.split("\n")
    )
    text = ALIGNED.sub(_aligned, text)
    text = re.sub(r"^## (.+)$", lambda m: f"({section_target(chapter, m[1])})=\n{m[0]}", text, flags=re.MULTILINE)
    return ADDRESS.sub(r"<\1>", text)


def _aligned(block: re.Match) -> str:
    """Return several indented lines, whose columns belong together, as code that does not wrap."""
    return f"```{{code-block}} none\n:class: aligned\n\n{textwrap.dedent(block[0]).rstrip()}\n```\n"
