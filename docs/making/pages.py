"""Writes the pages that follow from others: contents (README's table), questions, errata, and the notation."""

import re
import tomllib
from pathlib import Path

from notebooks import section_target, sections

from scaling.book.drawing import frames_of_strategy
from scaling.mesh import AbstractMesh
from scaling.show import svg
from scaling.strategies import fsdp_tp

BOOK = "https://jax-ml.github.io/scaling-book/"
PARTS = ("roofline", "tpus", "sharding", "transformers", "training", "applied-training", "inference",
         "applied-inference", "profiling", "jax-stuff", "conclusion", "gpus")  # fmt: skip


def write_all(root: Path, notebooks) -> None:
    docs = root / "docs"
    asked = tomllib.loads((docs / "questions.toml").read_text())["question"]
    (docs / "contents.md").write_text(contents(root / "README.md"))
    (docs / "questions.md").write_text(questions(asked, notebooks))
    (docs / "errata.md").write_text(errata(notebooks))
    mesh = AbstractMesh({"X": 2, "Y": 2})
    title = "FSDP with tensor parallelism, forward, on X=2,Y=2"
    (docs / "static" / "fsdp_tp.svg").write_text(svg.played(frames_of_strategy(fsdp_tp, mesh)["forward"], mesh, title))
    (docs / "notation.md").write_text((root / "notation.md").read_text().replace("](docs/", "]("))


def mend_links(app, name: str, source: list[str]) -> None:
    """Mend what a page of docs/ links outside it: the notation and chapters are pages, a file of code is only named."""
    text = source[0].replace("](../notation.md", "](notation.md")
    if "/" not in name:
        text = re.sub(r"^```\n(.*\n[- ]*-  -[- ]*\n(?:.*\n)*?)```$", _as_table, text, flags=re.MULTILINE)
        text = re.sub(r"`(?:chapters/)?(\d\d_\w+)\.py`", r"[\1](chapters/\1.ipynb)", text)
        source[0] = re.sub(r"\[([^]]+)\]\(\.\./[^)]+\)", r"\1", text)


def _as_table(block: re.Match) -> str:
    """Return a printed table, whose second line underlines each column, as one of Markdown."""
    head, rule, *lines = block[1].splitlines()
    spans = [slice(*each.span()) for each in re.finditer("-+", rule)]
    rows = [[head[span].strip() for span in spans], ["---"] * len(spans)]
    after = []
    for line in lines:
        cells = [line[span].strip() for span in spans]
        if not line[: spans[1].start - 2].strip():
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
        elif cells[0].isdigit() and not line[spans[0].stop : spans[1].start].strip():
            rows.append(cells)
        else:
            after.append(line)  # what is printed below the table
    shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*shown, "", *after])


def contents(readme: Path) -> str:
    """README's table of chapters by part, each a link, and the tree of the site's pages."""
    rows = re.findall(r"^\| (\d.*?) \| (`.*?`) \| (.*?) \| ([\d, ]+) \|$", readme.read_text(), re.MULTILINE)
    text = [
        "# The book, section by section",
        "",
        "The book's sections, the chapters that run them, and what they show.",
    ]
    for number, part in enumerate(PARTS, 1):
        text += ["", f"## Part {number}", "", f"[{BOOK}{part}]({BOOK}{part})", "",
                 "| section | chapter | what you see | minutes |", "|---|---|---|---:|"]  # fmt: skip
        named = []
        for section, names, shows, minutes in rows:
            if int(re.match(r"[\d, ]*\b(\d+)", section)[1]) == number:
                stems = re.findall(r"`([^`]+)\.py`", names)
                named += stems
                links = ", ".join(f"[{stem}](chapters/{stem}.ipynb)" for stem in stems)
                text.append(f"| {section} | {links} | {shows} | {minutes} |")
        text += [
            "",
            "```{toctree}",
            ":hidden:",
            f":caption: Part {number}",
            "",
            *(f"chapters/{n}" for n in named),
            "```",
        ]
    return "\n".join(text) + "\n"


def questions(asked, notebooks) -> str:
    """Every question of the book: what it asks, our answers beside the book's, and the section that computes them."""
    text = [
        "# Every question of the book",
        "",
        "What each asks, in our words. The hint is the formula; the answer has the book's number beside ours.",
    ]
    for number in range(1, len(PARTS) + 1):
        here = [q for q in asked if q["part"] == number]
        if here:
            text += ["", f"## Part {number}: {len(here)}", ""]
        for q in here:
            text += [
                "",
                f"### {q['name']}",
                "",
                q["asks"],
                "",
                *folded("Hint", _hint(q, notebooks)),
                *folded("Answer", [f"Computed in {_place(q, notebooks)}.", "", *_rows(q, notebooks)]),
            ]
    return "\n".join(text) + "\n"


def folded(title: str, lines: list[str]) -> list[str]:
    """Return lines of Markdown that open at a click on their title; none if there are no lines."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>", ""] if lines else []


def _hint(question, notebooks) -> list[str]:
    """Return the formula by which our first answer follows, where the chapter has one and the book is not wrong."""
    answers = answers_of(question, notebooks)
    return next(([_cell(answer["note"])] for answer in answers if answer["note"]), [])


def answers_of(question, notebooks) -> list[dict]:
    """The rows of a chapter that answer a question: those whose label its pattern matches."""
    if "answers" not in question:
        return []
    chapter, pattern = question["chapter"], question["answers"]
    found = [given for given in notebooks[chapter].metadata["answers"] if re.match(pattern, given["question"])]
    if not found:
        raise SystemExit(
            f"{question['name']}: {chapter} gives no answer {pattern!r}\n  fix: correct docs/questions.toml"
        )
    return found


def section_of(question, notebooks) -> str:
    """The section that computes a question's answers."""
    if "section" in question:
        return next(
            title for title in sections(notebooks[question["chapter"]]) if title.startswith(question["section"])
        )
    return answers_of(question, notebooks)[0]["section"]


def _place(question, notebooks) -> str:
    section = section_of(question, notebooks)
    return f"[{question['chapter']}: {section}](#{section_target(question['chapter'], section)})"


def _rows(question, notebooks) -> list[str]:
    rows = [answer["row"] for answer in answers_of(question, notebooks)]
    table = ["| | book | ours | | off by | verdict |", "|---|---:|---:|---|---:|---|"]
    return table + ["| " + " | ".join(_cell(word) for word in row) + " |" for row in rows] if rows else []


def _cell(word: str) -> str:
    return re.sub(r"([|*_\[\]{}`$<>])", r"\\\1", word)


def errata(notebooks) -> str:
    """Return the page of what the chapters mark as wrong in the book, and apart from it of what is rounded coarsely."""
    wrong = by_part(notebooks, lambda answer: answer["verdict"] == "erratum")
    coarse = by_part(notebooks, lambda answer: answer["verdict"] == "rounding" and answer["coarse"])
    return "\n".join([
        "# Errata of the book", "",
        "What the book's text of July 2026 says, what is right, and why, as the chapters compute it.", "",
        "## Wrong", *wrong, "",
        "## Rounded coarsely", "",
        "The book's way is right here, and its number is further from the exact one than its digits say.", *coarse,
    ]) + "\n"  # fmt: skip


def by_part(notebooks, is_listed) -> list[str]:
    """Return the lines of a table for each part of the book that has answers of this kind."""
    text = []
    for number in range(1, len(PARTS) + 1):
        rows = []
        for name, notebook in notebooks.items():
            for answer in notebook.metadata.get("answers", ()):
                if int(name[:2]) == number and is_listed(answer):
                    link = f"[{name}](#{section_target(name, answer['section'])})"
                    question, book, ours, unit, *_ = map(_cell, answer["row"])
                    rows.append(f"| {question} | {book} | {ours} {unit} | {_cell(answer['why'])} | {link} |")
        if rows:
            head = ["| of what | the book | right | why | computed in |", "|---|---:|---:|---|---|"]
            text += ["", f"### Part {number}", "", *head, *rows]
    return text
