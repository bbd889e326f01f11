"""A run reads the data that it began with to its end, or, if that is asked for, a new epoch of other data."""

import shutil
from pathlib import Path

import numpy
import pytest
from runs import SMALL, losses, refusal, train, tree_of, write_text

from scaling.train import batches
from scaling.train.corpus import Corpus


def edited(name: str, text: str | None) -> None:
    """Write a file of the data, or remove it."""
    path = Path("data", name)
    path.unlink() if text is None else path.write_text(text)


CHANGES = {  # what becomes of a folder of a.txt, b.txt and c.jsonl: what is said of it; "" for what is no change
    "it is moved": (lambda: Path("data").rename("moved"), ""),
    "its files have other names, in the same order": (lambda: Path("data/a.txt").rename("data/aa.txt"), ""),
    "its files are younger": (lambda: Path("data/a.txt").touch(), ""),
    "more": (lambda: edited("d.txt", "more " * 50), "data/d.txt was added"),
    "less": (lambda: edited("a.txt", None), "data/a.txt was removed"),
    "other text of one length": (lambda: edited("b.txt", "c" * 900), "data/b.txt has changed (900 bytes, now 900)"),
    "another order": (lambda: Path("data/a.txt").rename("data/bb.txt"), "data/bb.txt was added"),
    "a chat": (lambda: edited("c.jsonl", '{"text": "x"}'), "data/c.jsonl has changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_changed_data_are_refused_with_what_has_changed(begun, capsys, what):
    change, words = CHANGES[what]
    Path("data").mkdir()
    for name, text in {"a.txt": "ab" * 800, "b.txt": "b" * 900, "c.jsonl": '{"text": "abcd"}'}.items():
        edited(name, text)
    assert train(f"--data data --out other {SMALL} --steps 1") == 0
    change()
    data = "--data moved" if Path("moved").exists() else ""
    if not words:
        assert train(f"--resume --out other --steps 2 {data}") == 0
        return
    before = tree_of("other")
    said = refusal(capsys, "--resume --out other --steps 2 --microbatches 2")
    assert "was begun with other data: " in said
    assert words in said
    assert "--new-data" in said
    assert tree_of("other") == before


@pytest.mark.slow
def test_new_data_begin_an_epoch_that_later_resumes_go_on_with(begun, capsys):
    """Not at a restart, for which the data are the same again."""
    write_text(330)
    shutil.copytree("run", "whole", dirs_exist_ok=True)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        real = batches.Batches.chosen
        patch.setattr(batches.Batches, "chosen", lambda self, seen: drawn.append(seen) or real(self, seen))
        assert train("--resume --out whole --data text.txt --steps 6 --new-data") == 0
        said = capsys.readouterr()
        assert "a new epoch of other data: " in said.out
        assert "text.txt has changed" in said.out
        assert "warning" not in said.err
        for steps in (3, 4, 6):
            assert train(f"--resume --data text.txt --steps {steps} --new-data") == 0
    assert drawn == [0, 2, 4, 6, 8, *(0, 2), *(2, 4), *(4, 6, 8)]  # one batch is read ahead
    assert losses("run") == losses("whole")
    assert "is at step 6 of 6" in refusal(capsys, "--resume")
    assert "other data: 1 sources, not 2" in refusal(capsys, "--resume --steps 7 --data text.txt:2,large.npy:1")


def test_text_that_was_held_out_is_not_trained_on_later():
    """Of 100 sequences, then of 111: an epoch has each of the others once. And where it has moved, it is said."""

    def cut(tokens, before=()):
        corpus = Corpus((numpy.array(tokens),), numpy.array([0]))
        train, valid = batches.hold_out(corpus, batch=4, length=10, seed=0)
        return batches.leave_out(train, [valid], before)

    _, held, gone = cut(range(1001))
    assert (held[0][:2], gone) == ([951, 1001], 0)
    later, held, gone = cut(range(1111), held)
    assert ([each[:2] for each in held], gone) == ([[1055, 1111], [951, 1001]], 0)
    epoch = [token for number in later.places for token in later.row(number)[0].tolist()]
    assert not {*epoch} & {*range(951, 1001), *range(1055, 1111)}
    assert sorted(later.number(place) for place in range(later.sequences)) == [*later.places]
    assert {*range(950), *range(1010, 1050)} <= {*epoch}
    assert cut([7, *range(1110)], held)[2] == 2
