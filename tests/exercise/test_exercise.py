"""Every exercise: its solution is right, and each planted wrong answer gets a message of its own that helps; what is no
answer is refused with what is wrong; the commands; a verdict in time, and nothing is left running."""

import json
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine import RankFailed

from scaling import launch
from scaling.exercise import __main__ as command
from scaling.exercise import exercise_named, exercises, grade, new
from scaling.exercise import ranks as judged
from scaling.exercise.judge import assess

ROOT = Path(__file__).parents[2]
ANSWERS = {path.stem: tomllib.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("answers/*.toml"))}


def judged_on_rank(mesh, name: str, text: str):
    return judged.on_rank(mesh, exercise_named(name), text)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_solution_and_the_planted_slips(ranks, monkeypatch, name):
    """Answers run on ranks that are there already; one that fails runs again as a reader's does, for its message."""

    def run(fn, sizes, exercise, text, timeout):
        try:
            return ranks(judged_on_rank, sizes, exercise.name, text)
        except RankFailed:
            return launch.run(fn, sizes, exercise, text, timeout=timeout)

    monkeypatch.setattr(judged, "launch", SimpleNamespace(run=run))
    right, wrong = ANSWERS[name]["right"], ANSWERS[name]["wrong"]
    assert 3 <= len(wrong) <= 5
    assert not assess(exercise_named(name), new(name))[0]  # what is handed out
    passed, praise = assess(exercise_named(name), right)
    assert passed, praise
    assert "enough" not in praise  # the least bytes known, sent and held
    messages = []
    for slip in wrong:
        of, becomes = slip["of"].removeprefix("\n"), slip["is"].removeprefix("\n")
        assert right.count(of) >= 1, of
        passed, message = assess(exercise_named(name), right.replace(of, becomes, 1))
        assert not passed, f"{becomes!r} passed: {message}"
        assert slip["says"] in message, f"{becomes!r} is told {message!r}"
        messages.append(message)
    assert len(set(messages)) == len(messages), messages
    lines = [line.strip() for line in right.splitlines() if "(" in line and "import" not in line and "def " not in line]
    for message in messages:
        assert not any(line in message for line in lines), f"it gives the answer away: {message}"


IN_PAGE = """
import json, sys
for name in ("torch", "numpy", "optree"):
    sys.modules[name] = None  # as in a browser, where they are not
import play
print(json.dumps([play.answer("exercise", given) for given in json.load(sys.stdin)]))
"""


def test_the_page_judges_what_needs_no_ranks_as_the_command_does():
    """Right answers and all planted slips, by the site's program in a Python without torch."""
    given, wanted = [], []
    for name, answers in ANSWERS.items():
        if exercise_named(name).kind != "write":
            right = answers["right"]
            slips = [
                (right.replace(slip["of"].strip("\n"), slip["is"].strip("\n"), 1), slip) for slip in answers["wrong"]
            ]
            given += [json.dumps({"exercise": name, "text": text}) for text in (right, *(text for text, _ in slips))]
            wanted += [(True, "right: "), *((False, slip["says"]) for _, slip in slips)]
    assert len(given) >= 60
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'docs/static'}"}
    run = subprocess.run(
        [sys.executable, "-c", IN_PAGE], input=json.dumps(given), capture_output=True, text=True, env=env, check=True
    )
    for asked, (right, says), answer in zip(given, wanted, map(json.loads, json.loads(run.stdout)), strict=True):
        assert answer["right"] == right, asked
        assert says in answer["text"], (asked, answer)


NAME = "05_fsdp_forward"
RIGHT = f'"""Exercise {NAME}: an answer"""\n{ANSWERS[NAME]["right"]}'
BODY = "    Tmp = einsum("


def spoilt(line: str) -> str:
    """The right answer with a line before its first product."""
    assert BODY in RIGHT
    return RIGHT.replace(BODY, f"    {line}\n{BODY}")


TOLD = {
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
        "the ranks along X do not make the same call\n",  # and what follows, not the last line alone
    ),
    "none": (RIGHT.replace("return Out", "return None"), "is None"),
    "too many": (RIGHT.replace("return Out", "return Out, Out"), "2 results where 1"),
    "right, but holds more": (spoilt("room = In.new_zeros(100, 100)"), "are enough: what could be gathered later?"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOLD)
def test_wrong_answers_get_a_helpful_message(kind):
    text, expected = TOLD[kind]
    right, said = assess(exercise_named(NAME), text)
    assert right == kind.startswith("right")
    assert expected in said


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ANSWERS)
    assert ANSWERS.keys() == exercises().keys()
    assert len(ANSWERS) >= 30
    assert sum(len(answers["wrong"]) for answers in ANSWERS.values()) >= 100
    assert command.main(["new", NAME]) == 0
    file = Path(f"{NAME}.py")
    assert "..." in file.read_text()
    assert all(len(line) <= 120 for line in file.read_text().splitlines())
    Path("other.py").write_text("x = 1\n")
    for refused in (["new", NAME], ["new", "no_such"], ["check", "other.py"], ["check", "not_there.py"]):
        assert command.main(refused) == 1, refused
        assert "fix:" in capsys.readouterr().err


@pytest.mark.slow
def test_verdicts_come_in_time_and_nothing_is_left_running(tmp_path, monkeypatch, capfd):
    """Of answers that hang, end their process and print."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its processes are known by this folder's name
    waits = "while not In.is_meta and mesh.rank == 1:\n        pass"
    (file := tmp_path / "a.py").write_text(RIGHT.replace("def forward", "print('hello')\n\n\ndef forward"))
    with ThreadPoolExecutor() as pool:
        late, ended = pool.submit(grade, spoilt(waits), 5), pool.submit(grade, spoilt("raise SystemExit(3)"))
        assert command.main(["check", str(file)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("right: ")
    assert "hello" not in out
    assert str(ended.result()).startswith("not yet: ")
    assert "did not end within 5 s" in str(late.result())
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout
