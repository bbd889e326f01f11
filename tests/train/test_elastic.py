"""Fewer devices: P is halved, then X, never another axis; the global batch stays, by more microbatches."""

import pytest

from scaling.configs import get
from scaling.train import command as command
from scaling.train.elastic import fits_as_before, fitted, shared
from scaling.train.settings import Settings


@pytest.mark.parametrize(
    ("sizes", "world", "wanted"),
    [
        ({"P": 2, "X": 4, "Y": 2}, 16, {"P": 2, "X": 4, "Y": 2}),
        ({"P": 2, "X": 4, "Y": 2}, 8, {"P": 1, "X": 4, "Y": 2}),
        ({"P": 2, "X": 4, "Y": 2}, 4, {"P": 1, "X": 2, "Y": 2}),
        ({"Z": 2, "X": 4, "C": 2}, 8, {"Z": 2, "X": 2, "C": 2}),
    ],
)
def test_what_gives(sizes, world, wanted):
    found = fitted(sizes, world)
    assert found == wanted
    before = Settings(get("tiny"), "", "", batch=32, microbatches=2)
    after = shared(before, sizes, found)
    rows = [s.batch // s.microbatches // (m.get("P", 1) * m.get("X", 1)) for s, m in ((before, sizes), (after, found))]
    assert rows[0] == rows[1]  # of a microbatch on each rank
    assert after.batch == before.batch


@pytest.mark.parametrize(("sizes", "world"), [({"X": 2, "Y": 4}, 2), ({"X": 3}, 2), ({"X": 2}, 4), ({"Z": 8}, 4)])
def test_what_does_not_fit_is_refused(sizes, world):
    with pytest.raises(ValueError, match=f"does not fit {world} ranks"):
        fitted(sizes, world)


def test_memory_is_counted_again_unless_pods_alone_are_fewer(monkeypatch):
    sizes = {"P": 2, "X": 2, "Y": 2}
    assert not fits_as_before(sizes, sizes)  # the first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert fits_as_before(sizes, sizes)
    assert fits_as_before(sizes, sizes | {"P": 1})
    assert not fits_as_before(sizes, sizes | {"P": 1, "X": 1})


def test_restarts_on_fewer_ranks_keep_what_was_asked_for(monkeypatch, tmp_path):
    """run.toml, which each start reads, has the options as they were given: else each would share the batch again."""
    started = []
    monkeypatch.setattr(
        command, "trained", lambda settings, sizes, args: started.append((settings.microbatches, sizes))
    )
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "text").write_text("text")
    given = ["--data", str(tmp_path / "text"), "--out", str(tmp_path), "--resume"]
    for _ in range(3):
        command.main([*given, "--mesh", "P=2,X=2"])
    command.main(["--out", str(tmp_path), "--resume"])
    assert started == [(2, {"P": 1, "X": 2})] * 4
    assert "microbatches = 1\n" in (tmp_path / "run.toml").read_text()
