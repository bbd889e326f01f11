"""The chapters of Parts 4, 5 (the analytic half) and 6: each answer agrees with the book or is a proven erratum."""

import importlib.util
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[1] / "chapters"


def chapter(name: str):
    spec = importlib.util.spec_from_file_location(name, CHAPTERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["04_transformers"])
def test_answers(name):
    answers = chapter(name).answers()
    assert not [answer.row for answer in answers if answer.verdict == "DIFFERS"]
    assert sum(answer.verdict == "agrees" for answer in answers) > len(answers) / 2


def test_errata_of_part_4():
    got = {a.question: a.ours for a in chapter("04_transformers").answers() if a.verdict == "erratum"}
    assert got == {
        "Takeaways: FLOPs of the vocabulary / BTDV": 6,
        "1 params": 17_442_541_568,
        "4 compute-bound from S =": 480,
    }


def test_part_4_measures_what_it_says():
    part4 = chapter("04_transformers")
    assert part4.forward_and_backward() == (2 * 64 * 32 * 16, 4 * 64 * 32 * 16)
    assert part4.checkpointing(1, 8)[1]
    assert part4.attention_kernels()
