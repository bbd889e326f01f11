"""The commands, and answers that are no answers: each gets a clear verdict in time, and nothing is left running."""

import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from test_exercise_answers import ANSWERS

from scaling.exercise import __main__ as command
from scaling.exercise import exercises, grade, new
from scaling.exercise.judge import assess
from scaling.exercise.page import exercise_named

NAME = "05_fsdp_forward"
RIGHT = f'"""Exercise {NAME}: an answer"""\n{ANSWERS[NAME]["right"]}'
BODY = "    Tmp = einsum("


def spoilt(line: str) -> str:
    """The right answer with a line before its first product."""
    assert BODY in RIGHT
    return RIGHT.replace(BODY, f"    {line}\n{BODY}")


NO_ANSWERS = {
    "blank": (new(NAME), "still blank"),
    "no Python": (RIGHT + "\ndef", "is not Python"),
    "nothing imported": (RIGHT.replace("from scaling", "# from scaling"), "NameError"),
    "no function": (RIGHT.replace("def forward", "def backward"), "there is no function forward"),
    "the library's own": ("from scaling.strategies import fsdp\n" + RIGHT, "imports scaling.strategies"),
    "another collective": (RIGHT.replace("import all_gather", "import unshard, all_gather"), "imports unshard"),
    "torch's own": (spoilt("__import__('torch.distributed')"), "a way of its own"),
    "fails as it is read": (RIGHT + "\n1 / 0\n", "ZeroDivisionError"),
    "fails on ranks": (spoilt("assert In.device.type == 'meta'"), "AssertionError"),
    "ranks that disagree": (
        spoilt("In = In if In.is_meta or mesh.rank else all_gather('In[B_X, D] -> In[B, D]', In, mesh)"),
        "rank",
    ),
    "none": (RIGHT.replace("return Out", "return None"), "is NoneType"),
    "too many": (RIGHT.replace("return Out", "return Out, Out"), "2 results where 1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", NO_ANSWERS)
def test_no_answer(kind):
    text, expected = NO_ANSWERS[kind]
    right, said = assess(exercise_named(NAME), text)
    assert not right
    assert expected in said


@pytest.mark.slow
def test_a_right_answer_that_holds_more_is_told():
    right, said = assess(exercise_named(NAME), spoilt("room = In.new_zeros(100, 100)"))
    assert right
    assert "are enough: what could be gathered later?" in said


@pytest.mark.slow
def test_a_right_answer_that_prints_is_right(capfd):
    assert grade(RIGHT.replace("def forward", "print('hello')\n\n\ndef forward")).right
    assert "hello" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("line", ["while True: pass", 'all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh)'])
def test_an_answer_that_hangs_is_ended_with_all_that_it_started(line, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its processes are known by this folder's name
    text = RIGHT.replace(BODY, f"    if not In.is_meta and mesh.rank == 1:\n        {line}\n{BODY}")
    began = time.monotonic()
    verdict = grade(text, seconds=5)
    assert not verdict.right
    assert time.monotonic() - began < 9
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not left


@pytest.mark.slow
def test_an_answer_that_ends_its_process():
    verdict = grade(spoilt("raise SystemExit(3)"))
    assert not verdict.right


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in exercises())
    assert command.main(["new", NAME]) == 0
    file = Path(f"{NAME}.py")
    assert "..." in file.read_text()
    assert all(len(line) <= 120 for line in file.read_text().splitlines())
    Path("other.py").write_text("x = 1\n")
    for refused in (["new", NAME], ["new", "no_such"], ["check", "other.py"], ["check", "not_there.py"]):
        assert command.main(refused) == 1, refused
        assert "fix:" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_judges(tmp_path, capsys):
    (tmp_path / "a.py").write_text(RIGHT)
    assert command.main(["check", str(tmp_path / "a.py")]) == 0
    assert "right: " in capsys.readouterr().out
    (tmp_path / "a.py").write_text(new(NAME))
    assert command.main(["check", str(tmp_path / "a.py")]) == 1
    assert "not yet: " in capsys.readouterr().out
