"""Every table is written by one writer, which no cell can break."""

import random
import re
from pathlib import Path

import pytest

from scaling.common.tables import table

ROOT = Path(__file__).parents[2]
CELLS = [
    "",
    "1,024",
    "-1_0",
    "1e5",
    "nan",
    "0x10",
    "two words",
    "one\n  two",
    "[a](b)",
    "\ttab",
    "a-b-c " * 9,
    "漢字",
    7,
    1.5,
    None,
]


@pytest.mark.parametrize("seed", range(50))
def test_each_cell_is_in_its_column(seed):
    dice = random.Random(seed)
    n, columns = dice.randint(1, 5), dice.choice([20, 60, 100])
    rows = [dice.choices(CELLS, k=dice.randint(1, n)) for _ in range(dice.randint(0, 4))]
    lines = table(rows, ["a head", *map(str, range(n - 1))], columns).splitlines()
    rule = next(line for line in lines if line.strip("- ") == "")
    spans = [match.span() for match in re.finditer("-+", rule)]
    assert len(spans) == n
    body = lines[lines.index(rule) + 1 :]
    for i, (start, end) in enumerate(spans):
        wanted = [word for row in rows for word in str(row[i] if i < len(row) else "").split()]
        assert [word for line in body for word in line[start:end].split()] == wanted
        assert all(line[end : end + 2].strip() == "" for line in body)
    assert len(rule) <= columns or all(end - start <= 10 for start, end in spans)


def test_tables_have_one_writer():
    sources = [path for folder in ("scaling", "chapters", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if re.search(r"^\s*(from|import) tabulate", path.read_text(), re.M)] == []
