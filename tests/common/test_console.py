"""Commands at their edges: numbers without bound, files that cannot be written, readers that go away: one line each.
Every table is written by one writer, which no cell can break."""

import argparse
import contextlib
import json
import random
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from machine import ended

import scaling
from scaling.book.drawing import main as listing
from scaling.check import main as check
from scaling.common import arguments, console
from scaling.common.arguments import check_fields, read_table
from scaling.common.console import table
from scaling.configs import load
from scaling.measure import command as measure
from scaling.measure.network import main as network
from scaling.plan.__main__ import main as plan
from scaling.plan.guide import main as guide
from scaling.plan.serve.measured import main as measured
from scaling.show import main as show
from scaling.show.timelines import main as schedule
from scaling.train.command import main as train
from scaling.train.flight import main as flight

NINES = "9" * 5000
PLAN = ["--model", "llama3-70b", "--chip", "v5p", "--chips", "8960", "--batch", "4M"]
BAD = {  # (command, arguments): words of the last line
    (show, "--mesh", f"X={NINES}"): "cannot read 'X=999",
    (show, "--mesh", "X=100000,Y=100000"): "a mesh of 10,000,000,000 devices is not drawn, at most 4,096 are",
    (show, "A[I]", "--mesh", "X=4,X=8"): "--mesh X=4,X=8: axis X is given twice",
    (schedule, "1f1b", "--stages", "2000", "--microbatches", "8000"): "16,000,000 forward passes are not drawn",
    (schedule, "1f1b", "--stages", "0"): "'0' is not a whole number of at least 1",
    (plan, *PLAN[:-1], "1e400"): "'1e400' is not a number",
    (plan, *PLAN[:-1], NINES): "(5,000 characters)' is not a number",
    (plan, *PLAN, "--top", NINES): "(5,000 characters)' is not a whole number",
    (plan, *PLAN, "--mfu", "nan"): "'nan' is not a number from 1e-06 to 1",
    (guide, "--model", "llama3-8b", "--memory", "1e400GB"): "'1e400GB' is no number of bytes; fix: write it as 24GB",
    (measure.main, "--out", "/nonexistent/x.toml"): "cannot write /nonexistent/x.toml: there is no folder /nonexistent",
    (measure.main, "--out", "/"): "cannot write /: is a folder",
    (measure.main, "--chip", "/nonexistent/x.toml"): "/nonexistent/x.toml: cannot be read",
    (check, "/nonexistent.py"): "no such file",
    (listing, "/nonexistent.py"): "/nonexistent.py: no such file or folder fix: give the path of one",
    (listing, "/"): "/: is a folder fix: give the path of a file",
    (measured, "/nonexistent.csv"): "is not a file fix: give systems/silicon_sample.csv of github.com/ai-dynamo/",
    (network, "--folder", "/nonexistent"): "there is no such folder",
    (flight, "x" * 300): "no run is here",
    (show, "A[I]", "--plot", "x" * 300 + ".svg"): "(304 characters): File name too long",
    (show, "A[I]", "--plot", "x.json"): "ends in .svg",
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[1:])[:40])
def test_a_bad_argument_ends_in_one_clear_line(case, capsys):
    main, *arguments = case
    code = ended(main, arguments)
    said = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2)
    assert BAD[case] in " ".join(line.strip() for line in said)
    assert max(map(len, said)) <= 100
    assert "Traceback" not in "".join(said)


def test_types_of_options(tmp_path):
    assert console.integer(1)("12") == 12
    assert console.number(kind=Fraction)("1/3") == Fraction(1, 3)
    assert console.number()("0.25") == 0.25
    assert console.output("here.toml") == "here.toml"
    (tmp_path / "link").symlink_to("gone")
    no_places = {tmp_path / "link": "it must be FILE", tmp_path / "link" / "deeper": "it must be FILE"}
    if Path("/proc/self").exists():  # on Linux
        no_places[Path("/proc/nothing/x")] = "cannot write /proc/nothing/x: "
    for path, words in no_places.items():
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            console.place(str(path))


def test_a_reader_that_goes_away_ends_a_command_quietly():
    command_line = [sys.executable, "-m", "scaling.show", "schedule", "all"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.wait() == 141


def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch, tmp_path):
    def main():
        raise KeyboardInterrupt

    assert console.command(main) == 130
    assert capsys.readouterr().err == "interrupted\n"
    (tmp_path / "stopped_while_imported.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    assert console.command_of("stopped_while_imported") == 130
    file = "__main__.py"
    for tool in (f"train/{file}", "generate.py", f"serve/{file}", f"measure/{file}", f"profile/{file}"):
        text = (Path(scaling.__file__).parent / tool).read_text(encoding="utf-8")  # it imports nothing else before
        assert re.findall("^(?:from|import) (\\S+)", text, flags=re.M) == ["sys", "scaling.common.console"]
    assert console.command(lambda: 3) == 3


DOC = """A tool that does something, said in a paragraph of more than one line, which is filled again to as many columns
as there are.

    python -m tool --option VALUE  # stays a line
    python -m tool --other VALUE

    A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]: a line of 73 columns, continued as it is indented; https://example.org/an-address
"""


@pytest.mark.parametrize(("columns", "wide"), [(60, 60), (100, 100), (200, 100)])
def test_help_and_text_are_60_to_100_columns_wide_and_keep_examples(monkeypatch, columns, wide):
    monkeypatch.setenv("COLUMNS", "10")
    assert console.width() == 60
    monkeypatch.setenv("COLUMNS", str(columns))
    assert console.width() == wide
    folded = console.fold("    indented " + "word " * 40).splitlines()
    assert max(map(len, folded)) <= wide
    assert folded[1].startswith("        word")
    parser = argparse.ArgumentParser(description=DOC, formatter_class=console.HelpFormatter)
    parser.add_argument("--long", help="words that go on " * 12)
    lines = parser.format_help().splitlines()
    assert wide - 20 < max(map(len, lines)) <= wide
    assert [line for line in lines if line.startswith("    python")] == [DOC.splitlines()[3], DOC.splitlines()[4]]
    assert any(line.endswith("https://example.org/an-address") for line in lines)
    assert [line for line in lines if "continued" in line or "indented" in line][-1].startswith("    ")


def test_a_description_is_a_sentence_without_the_command():
    for text in ("`python -m tool FILE`: read: it", "Read: it: `python -m tool`.", "read: it."):
        assert console.Parser(description=f"{text}\n\nMore").description == "Read: it.\n\nMore"


def test_errors_fit_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console.complain("a rule that takes " * 9 + "x" * 300 + "\n  fix: leave it out")
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "  fix: leave it out"
    assert "(300 characters)" in " ".join(lines)
    with pytest.raises(SystemExit):
        console.Parser(prog="tool").parse_args(["word " * 40])
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 80


def test_every_command_and_script_has_the_parser_whose_help_and_errors_fit():
    root = Path(__file__).parents[1]
    folders = [Path(scaling.__file__).parent, *(root / name for name in ("benchmarks", "oracles", "sweeps"))]
    texts = {path.name: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in (root.parent / "chapters").glob("*.py")}
    own = {name for name, text in texts.items() if "ArgumentParser(" in text or "print(__doc__)" in text}
    assert own == {"jax_answers.py"}  # where JAX is, this package is not


@dataclass(frozen=True)
class Record:
    count: int = 1
    rate: float | None = 0.5
    on: bool = True
    names: tuple[str, ...] = ()


def test_fields_of_another_type_are_named():
    check_fields(Record(rate=1))
    check_fields(Record(rate=None))
    for name, wrong in [("count", 1.0), ("count", True), ("rate", "x"), ("rate", False), ("on", 1), ("names", "x")]:
        with pytest.raises(ValueError, match=f"t: {name} is .*must be"):
            check_fields(Record(**{name: wrong}), "t: ")


@pytest.mark.parametrize("name", ["a.json", "a.toml"])
def test_a_file_without_a_table_is_named(tmp_path, name):
    for text in (None, b"{", b"[1", b"1", bytes(range(256)), b"[" * 10**5, *[b""] * name.endswith("json")):
        if text is not None:
            (tmp_path / name).write_bytes(text)
        with pytest.raises(ValueError, match=r"(?s)a\.(json|toml)(:| is).*fix:"):
            read_table(tmp_path / name)


CONFIG = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}


@pytest.mark.parametrize("key", [*CONFIG, "rope_scaling", "layer_types", "model_type", "rope_theta", "text_config"])
def test_a_config_with_a_key_of_another_type_is_refused_or_right(tmp_path, key):
    for value in ("x", [], 1.5, -1, True, {"x": 1}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        with contextlib.suppress(ValueError):
            load(tmp_path / "config.json")


@pytest.mark.parametrize(
    "line",
    ["lr = -1", "mesh = 3", "norms = {x = 1}", 'dtype = ""', "guard_every = [1]", "resume = 1", "typo = 1", "lr"],
)
def test_a_file_of_options_is_checked_as_the_options_are(tmp_path, capsys, line):
    (tmp_path / "options.toml").write_text(line)
    assert ended(train, ["--config", str(tmp_path / "options.toml"), "--dry-run"]) in (1, 2)
    assert "rror:" in capsys.readouterr().err


HUGE = 10**5000  # Python writes no number of so many digits


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: arguments.whole(n=-HUGE), "n = a number of 16610 bits: must be a whole number, 1 or more"),
        (lambda: arguments.positive(n=-HUGE), "n = a number of 16610 bits: must be a positive number"),
        (lambda: arguments.not_negative(n=-HUGE), "n = a number of 16610 bits: must be a number, zero or more"),
        (lambda: arguments.one_of("n", HUGE, (1, 2)), "n = a number of 16610 bits: one of 1, 2"),
        (lambda: arguments.of_type("n", HUGE, str), "n is a number of 16610 bits: must be a text"),
        (lambda: arguments.whole_numbers("n", [HUGE, 0.5]), "n = a list of numbers with thousands of digits: must be"),
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_in_words(check, said):
    with pytest.raises(ValueError, match=said):
        check()


def test_a_command_is_folded_before_options_and_stays_one_command():
    line = "  python -m scaling.train " + " ".join(f"--option-{i} 'a value'" for i in range(20))
    folded = console.fold_command(line)
    assert max(map(len, folded.splitlines())) <= 100
    assert shlex.split(folded.replace("\\\n", "")) == shlex.split(line)
    assert console.fold_command("run: python x.py --a 1") == "run: python x.py --a 1"
    shown = console.Parser(prog="x", epilog="Examples:\n\n    " + line.strip() + "\n").format_help()
    example = shown.partition("Examples:")[2].replace("\\\n", "")
    assert shlex.split(example) == shlex.split(line)


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
