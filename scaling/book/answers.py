"""The book's answer beside ours, with a verdict. A chapter lists `Answer`s, prints them, and fails if one differs.

Answer("5 Q1: params of LLaMA-2 13B", "13.0e9", num_params(get("llama2-13b")), "params").verdict -> "agrees"
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from tabulate import tabulate

from scaling.cost.units import significant


def rounding(text: str) -> tuple[float, float]:
    """The number that a text gives, and how far off another may be: "4.2e11" -> (4.2e11, 1e10).

    One unit of the last significant digit, or half of it if there is no other digit. The zeros that end a whole number
    count as rounding: "47,000" -> (47000.0, 1000.0), "100" -> (100.0, 50.0).
    """
    match = re.fullmatch(r"(-?)([\d,]+)(?:\.(\d+))?(?:e([+-]?\d+))?", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no number: write it as 4.2e11, 47,000 or 0.33")
    sign, whole, fraction, exponent = match.groups()
    digits = whole.replace(",", "") + (fraction or "")
    significant = digits if fraction else digits.rstrip("0") or "0"
    power = int(exponent or 0) + len(digits) - len(significant) - len(fraction or "")
    unit = float(f"1e{power}")
    return float(f"{sign}{significant}e{power}"), unit if len(significant.lstrip("0")) > 1 else unit / 2


@dataclass(frozen=True)
class Answer:
    """One question. `book`: the number as the book prints it, its word for a yes-or-no question, or "" if it has none.

    Verdicts: "agrees", a number within the book's rounding; "erratum", one that is not, with the reason
    in `erratum`; "ours", the book has no answer and `note` says how ours follows; "DIFFERS", which fails the chapter,
    also when an erratum is claimed that is none.
    """

    question: str
    book: str
    ours: "float | str"
    unit: str = ""
    note: str = ""
    erratum: str = ""

    @property
    def agrees(self) -> bool:
        if isinstance(self.ours, str):
            return self.book == self.ours
        value, slack = rounding(self.book)
        return abs(self.ours - value) <= slack * (1 + 1e-9)

    @property
    def verdict(self) -> str:
        if not self.book:
            return "ours" if self.note else "DIFFERS"
        if self.erratum:
            return "DIFFERS" if self.agrees else "erratum"
        return "agrees" if self.agrees else "DIFFERS"

    @property
    def row(self) -> tuple[str, ...]:
        ours = self.ours if isinstance(self.ours, str) else significant(self.ours)
        return self.question, self.book or "-", ours, self.unit, self.verdict, self.erratum or self.note


def table(answers: Sequence[Answer]) -> str:
    head = ("question", "book", "ours", "unit", "verdict", "why")
    rows = [(fill(q, 52), *middle, fill(why, 56)) for q, *middle, why in (a.row for a in answers)]
    return tabulate(rows, head, "simple", disable_numparse=True)


def report(answers: Sequence[Answer]) -> int:
    """Print the table and a count of verdicts; the exit status: 0, or 1 if an answer differs."""
    print(table(answers))
    verdicts = [a.verdict for a in answers]
    names = ("agrees", "erratum", "ours", "DIFFERS")
    print("\n" + ", ".join(f"{verdicts.count(v)} {v}" for v in names if v in verdicts))
    return int("DIFFERS" in verdicts)
