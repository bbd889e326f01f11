"""Compare the book's answer with ours. A chapter lists `Answer`s, prints them, and fails if one differs.

For example, this one's verdict is "agrees":

    Answer("5 Q1: params of LLaMA-2 13B", "13.0e9", num_params(get("llama2-13b")), "params")
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from scaling.book import layout
from scaling.common.console import table

ANSWERED = ("question", "book", "ours", "unit", "off by", "verdict")  # the columns of a table of answers
VERDICTS = ("agrees", "rounding", "erratum", "ours", "DIFFERS")
WORDS = 16  # columns of an answer in words; a longer one continues on the next line
CLOSE, NEAR = 0.05, 0.10  # the largest relative differences of "agrees" and "rounding", however coarse the digits
HEDGED = 1 / 3  # the same if the book says "around" or "close to"
COARSE = 1.0  # the same if it rounds coarsely: up to a factor of two


def rounding(text: str) -> tuple[float, float]:
    """Return the number in a text and one unit of its last significant digit: "4.2e11" -> (4.2e11, 1e10).

    The zeros that end a whole number count as rounding: "47,000" -> (47000.0, 1000.0), "100" -> (100.0, 100.0).
    """
    match = re.fullmatch(r"(-?)([\d,]+)(?:\.(\d+))?(?:e([+-]?\d+))?", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a number\n  fix: write it as 4.2e11, 47,000 or 0.33")
    sign, whole, fraction, exponent = match.groups()
    digits = whole.replace(",", "") + (fraction or "")
    significant = digits if fraction else digits.rstrip("0") or "0"
    power = int(exponent or 0) + len(digits) - len(significant) - len(fraction or "")
    return float(f"{sign}{significant}e{power}"), float(f"1e{power}")


def off(book: str, ours: float) -> tuple[float, float]:
    """Return the difference of our number and the book's: relative to the book's, and in units of its last digit."""
    value, unit = rounding(book)
    return (ours - value) / abs(value) if value else float(ours != 0), (ours - value) / unit


def notation(value: float, book: str = "") -> str:
    """Return a number in the notation of the book's: to four digits or as many as the book's, 9.6e9 next to 9e9."""
    mantissa, _, exponent = book.partition("e")
    digits = max(4, sum(character.isdigit() for character in mantissa))
    if exponent:
        return layout.format_number(value / 10.0 ** int(exponent), digits) + f"e{int(exponent)}"
    text = layout.exact(value) if isinstance(value, int) else layout.format_number(value, digits)
    return text if "," in book or not book else text.replace(",", "")


@dataclass(frozen=True)
class Answer:
    """One question with the book's answer and ours.

    `book` is the number as the book prints it, its word for a yes-or-no question, or "" if it has none. The verdicts:

    "agrees": ours rounds to the book's number and is within 5%.

    "rounding": the book has cut off or rounded on the way. Ours is within 10%, and either within one unit of the last
    digit, or the book's number follows from `rounded`: the value by rounded terms, and which terms these are.
    If the book hedges its number, as in "around 100GB", `hedged` has its words, and ours may differ by a third. If the
    book rounds coarsely, `coarse` has the reason, and ours may differ by a factor of two.

    "erratum": ours is right and the book's number is not, for the reason in `erratum`.

    "ours": the book has no answer, and `note` says how ours follows.

    "DIFFERS": none of these, or an erratum or a rounding is claimed although the numbers agree. It fails the chapter.
    """

    question: str
    book: str
    ours: "float | str"
    unit: str = ""
    note: str = ""
    erratum: str = ""
    rounded: "tuple[float, str] | None" = None
    hedged: str = ""
    coarse: str = ""

    @property
    def difference(self) -> "float | None":
        """Ours minus the book's, relative to the book's; None if there are no two numbers to compare."""
        return off(self.book, self.ours)[0] if self.book and not isinstance(self.ours, str) else None

    @property
    def agrees(self) -> bool:
        """Whether ours is the book's word, or rounds to its number."""
        return self.book == self.ours if isinstance(self.ours, str) else _agree(self.book, self.ours)

    @property
    def verdict(self) -> str:
        """The verdict, one of VERDICTS."""
        if not self.book:
            return "ours" if self.note and not self.erratum and not self.rounded else "DIFFERS"
        if self.coarse:
            near = not isinstance(self.ours, str) and abs(off(self.book, self.ours)[0]) <= COARSE
            return "rounding" if near and not self.agrees else "DIFFERS"
        if self.erratum or self.rounded:
            holds = not self.agrees and not (self.erratum and self.rounded)
            near = not isinstance(self.ours, str) and abs(off(self.book, self.ours)[0]) <= NEAR
            follows = self.erratum or (near and _agree(self.book, (self.rounded or (0.0,))[0], 1))
            return ("erratum" if self.erratum else "rounding") if holds and follows else "DIFFERS"
        if self.agrees:
            return "agrees"
        if isinstance(self.ours, str):
            return "DIFFERS"
        if self.hedged:
            return "rounding" if abs(off(self.book, self.ours)[0]) <= HEDGED else "DIFFERS"
        relative, units = off(self.book, self.ours)
        return "rounding" if abs(units) <= 1 + 1e-9 and abs(relative) <= NEAR else "DIFFERS"

    @property
    def why(self) -> str:
        """The reasons given for the verdict."""
        rounded = f"the book takes {self.rounded[1]}" if self.rounded else ""
        hedged = f'the book says "{self.hedged}"' if self.hedged else ""
        return "; ".join(part for part in (rounded, hedged, self.coarse, self.erratum, self.note) if part)

    @property
    def row(self) -> tuple[str, ...]:
        """Question, the book's answer, ours, unit, difference, verdict."""
        ours = self.ours if isinstance(self.ours, str) else notation(self.ours, self.book)
        difference = (
            "" if self.difference is None else f"{self.difference:+.1%}".replace("+0.0%", "0").replace("-0.0%", "0")
        )
        return self.question, self.book or "-", ours, self.unit, difference, self.verdict


def _agree(book: str, value: float, digits: float = 0.5) -> bool:
    """Return whether a value is within 5%, and within `digits` units of the last digit that the book prints."""
    relative, units = off(book, value)
    return abs(units) <= digits + 1e-9 and abs(relative) <= CLOSE


def answer_table(answers: Sequence[Answer], columns: int | None = None) -> str:
    """Return the answers as a table; a reason is printed below its row."""
    right = (False, True, True, False, True, False)
    ours = ("\n".join(wrap(answer.row[2], WORDS, break_long_words=False)) for answer in answers)
    rows = [(*answer.row[:2], words, *answer.row[3:]) for answer, words in zip(answers, ours, strict=True)]
    return table(rows, ANSWERED, columns, right=right, hang="  ", below=[answer.why for answer in answers])


def verdict_counts(answers: Sequence[Answer]) -> str:
    """Return the number of each verdict: "31 agrees, 2 erratum"."""
    verdicts = [a.verdict for a in answers]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)
