"""Every exercise: its solution is right, and each planted wrong answer gets a message of its own that helps."""

import tomllib
from pathlib import Path

import pytest

from scaling.exercise import exercise_named, exercises, new
from scaling.exercise.judge import assess

FOLDER = Path(__file__).parent / "answers"
ANSWERS = {file.stem: tomllib.loads(file.read_text()) for file in sorted(FOLDER.glob("*.toml"))}


def said(name: str, answer: str) -> tuple[bool, str]:
    return assess(exercise_named(name), f'"""Exercise {name}: an answer"""\n{answer}')


def test_there_are_thirty_with_a_hundred_wrong_answers():
    assert set(ANSWERS) == set(exercises())
    assert len(ANSWERS) >= 30
    assert all(3 <= len(answers["wrong"]) <= 5 for answers in ANSWERS.values())
    assert sum(len(answers["wrong"]) for answers in ANSWERS.values()) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_the_solution_and_the_planted_slips(name):
    right, wrong = ANSWERS[name]["right"], ANSWERS[name]["wrong"]
    passed, praise = said(name, right)
    assert passed, praise
    assert "enough" not in praise  # the least bytes known, sent and held
    messages = []
    for slip in wrong:
        of, becomes = slip["of"].removeprefix("\n"), slip["is"].removeprefix("\n")
        assert right.count(of) >= 1, of
        passed, message = said(name, right.replace(of, becomes, 1))
        assert not passed, f"{becomes!r} passed: {message}"
        assert slip["says"] in message, f"{becomes!r} is told {message!r}"
        messages.append(message)
    assert len(set(messages)) == len(messages), messages
    lines = [line.strip() for line in right.splitlines() if "(" in line and "import" not in line and "def " not in line]
    for message in messages:
        assert not any(line in message for line in lines), f"it gives the answer away: {message}"


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_handed_out_is_not_yet_right(name):
    passed, message = assess(exercise_named(name), new(name))
    assert not passed, message
