"""Commands at their edges: numbers without bound, files that cannot be written, readers that go away: one line each."""

import argparse
import subprocess
import sys
from fractions import Fraction

import pytest

from scaling import measure
from scaling.check import main as check
from scaling.console import HelpFormatter, command, integer, number, output
from scaling.plan.__main__ import main as plan
from scaling.plan.guide import main as guide
from scaling.show import main as show

NINES = "9" * 5000
PLAN = ["--model", "llama3-70b", "--chip", "v5p", "--chips", "8960", "--batch", "4M"]
BAD = {  # (command, arguments): words of the last line
    (show, "--mesh", f"X={NINES}"): "cannot read 'X=999",
    (show, "--mesh", "X=100000,Y=100000"): "a mesh of 10,000,000,000 devices is not drawn, at most 4,096 are",
    (show, "A[I]", "--sizes", "I=4,I=8"): "--sizes I=4,I=8: dim I is given twice",
    (show, "A[I]", "--plot", "/nonexistent/x.png"): "cannot write /nonexistent/x.png: there is no folder /nonexistent",
    (show, "schedule", "1f1b", "--stages", "2000", "--microbatches", "8000"): "16,000,000 forward passes are not drawn",
    (show, "schedule", "1f1b", "--stages", "0"): "'0' is not a whole number from 1 to",
    (show, "schedule", "1f1b", "--times", "1,1e999,1"): "'1e999' is not a number",
    (show, "schedule", "1f1b", "--hop", "1/0"): "'1/0' is not a number",
    (plan, *PLAN[:-1], "1e400"): "'1e400' is not a number",
    (plan, *PLAN[:-1], "1.2.3"): "'1.2.3' is not a number",
    (plan, *PLAN[:-1], NINES): "(5,000 characters)' is not a number",
    (plan, *PLAN, "--top", NINES): "(5,000 characters)' is not a whole number",
    (plan, *PLAN, "--mfu", "nan"): "'nan' is not a number from 1e-06 to 1",
    (guide, "--model", "llama3-8b", "--memory", "1e400GB"): "'1e400GB': write a number with a unit",
    (measure.main, "--out", "/nonexistent/x.toml"): "cannot write /nonexistent/x.toml: there is no folder /nonexistent",
    (measure.main, "--out", "/"): "cannot write /: is a folder",
    (measure.main, "--ranks", "1"): "'1' is not a whole number from 2",
    (measure.main, "--chip", "/nonexistent/x.toml"): "/nonexistent/x.toml: cannot be read",
    (check, "/nonexistent.py"): "no such file",
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[1:])[:40])
def test_a_bad_argument_ends_in_one_clear_line(case, capsys):
    main, *arguments = case
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse's
        code = end.code
    said = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2)
    last = next(line for line in reversed(said) if not line.startswith("  fix:"))
    assert BAD[case] in last
    assert len(last) < 200
    assert "Traceback" not in "".join(said)


def test_types_of_options():
    assert integer(1)("12") == 12
    assert number(kind=Fraction)("1/3") == Fraction(1, 3)
    assert number()("0.25") == 0.25
    assert output("here.toml") == "here.toml"


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_command_quietly():
    for module, arguments in (("plan", [*PLAN, "--json"]), ("show", ["schedule", "all"])):
        command_line = [sys.executable, "-m", f"scaling.{module}", *arguments]
        with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.wait() == 141


def test_ctrl_c_ends_a_command_quietly():
    def main():
        raise KeyboardInterrupt

    assert command(main) == 130
    assert command(lambda: 3) == 3


DOC = """A tool that does something, said in a paragraph of more than one line, which is filled again to as many columns
as there are.

    python -m tool --option VALUE  # stays a line
    python -m tool --other VALUE

    A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]: a line of 73 columns, continued as it is indented; https://example.org/an-address
"""


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_help_is_at_most_100_columns_wide_and_keeps_examples(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = argparse.ArgumentParser(description=DOC, formatter_class=HelpFormatter)
    parser.add_argument("--long", help="words that go on " * 12)
    lines = parser.format_help().splitlines()
    assert min(columns, 100) - 20 < max(map(len, lines)) <= min(columns, 100)
    assert [line for line in lines if line.startswith("    python")] == [DOC.splitlines()[3], DOC.splitlines()[4]]
    assert any(line.endswith("https://example.org/an-address") for line in lines)
    assert [line for line in lines if "continued" in line or "indented" in line][-1].startswith("    ")
