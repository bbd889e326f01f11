"""Which tokenizer belongs to which ids: each (model, tokenizer, data, run) is right or refused, none is silent."""

import itertools
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="tables of tokenizers need the library: pip install tokenizers")
pytest.importorskip("safetensors")

from runs import train
from tokenized import WORDS

from scaling.models.text import home_of, tokenizer, tokenizer_of
from scaling.serve.text import ends_of
from scaling.train import command
from scaling.train.origin import options_of, tokenizer_in

MODEL = {  # name: (its vocabulary, its own tokenizer, whether it has weights)
    "hf": (32, "own", True), "bare": (32, None, True), "hf256": (256, "own", True), "bare256": (256, None, True),
    "less": (16, "own", True), "sizes.json": (32, None, False), "hf/config.json": (32, "own", False),
    "tiny": (256, None, False), "room": (300, "bytes", True),
}  # fmt: skip
IDS = {"bytes": 256, "own": len(WORDS), "other": len(WORDS), "long": len(WORDS) + 400, "ids": 0}
GIVEN = (None, "bytes", "own", "other", "long")
DATA = ("text.txt", "rows.npy", "shards-bytes", "shards-own", "shards-other", "rows.npy,text.txt")
DATA += ("shards-own:2,text.txt:1", "shards-own,shards-other", "rows.npy,shards-own", "rows.npy:1,rows.npy:2")


def parts_of(data):
    return [part.partition(":")[0] for part in data.split(",")]


def expected(name, scratch, given, data):
    """The tokenizer that is right for the four, or None where they are to be refused."""
    V, own, weights = MODEL[name]
    parts = parts_of(data)
    makers = [part.removeprefix("shards-") for part in parts if part.startswith("shards-")]
    made_here = scratch or not weights
    own = None if name.endswith(".json") else own
    by = given or own or (None if made_here or V != 256 else "bytes")
    if by is None and made_here:
        mixed = "rows.npy" in parts and len({*parts}) > 1 and V != 256  # whose those rows are is not known
        by = makers[0] if makers else None if mixed else "ids" if "rows.npy" in parts and V != 256 else "bytes"
    elif by is None:
        by = "ids" if {*parts} == {"rows.npy"} else None
    if by is None or (by != "bytes" and IDS[by] > V) or {*makers} - {by} or ("text.txt" in parts and by == "ids"):
        return None
    own = own or ("bytes" if V == 256 else None)  # weights of 256 ids have learned bytes
    return by if own in (None, by) or made_here else None


@pytest.fixture
def begun(place, monkeypatch, capsys):
    """Calls the command, among the models and data, up to where its ranks would start; what it made of its arguments,
    or its refusal."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(command, "trained", lambda settings, sizes, args: ran.append(settings) or 0)
    monkeypatch.setattr(command.dry, "refuse_too_large", lambda *given: None)
    monkeypatch.setattr(command.evaluate, "check_sample", lambda *given: None)
    monkeypatch.setattr(command.elastic, "fits_as_before", lambda *given: True)
    ran = []

    def begin(line: str = "", **more):
        """With --model, --tokenizer, --data and --out of what is given."""
        words = [f"--{name} {value}" for name, value in more.items() if value is not None]
        code = train(" ".join([line, *words, "--seq 8 --batch 2"]))
        return (ran.pop(), "") if code == 0 else (None, capsys.readouterr().err)

    return begin


def identity(by):
    return "" if by == "ids" else tokenizer(by).identity


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL)
def test_every_pair_is_right_or_refused(tmp_path, begun, name):
    right = 0
    every = [*itertools.product((False, True), GIVEN, DATA)]
    for i, (scratch, given, data) in enumerate(random.Random(name).sample(every, 50)):
        by, out = expected(name, scratch, given, data), tmp_path / str(i)
        settings, error = begun("--from-scratch" * scratch, model=name, data=data, out=out, tokenizer=given)
        what = f"{scratch=} {given=} {data}: {by=} {error}"
        assert (settings is None) == (by is None), what
        if settings is None:
            assert "fix:" in error
            assert not out.exists(), what
            continue
        right += 1
        found = {tokenizer_in(settings).identity, tokenizer_of(out, MODEL[name][0]).identity}
        assert found | {options_of(out)["identity"]} == {identity(by)}, what
        assert ends_of(out) == ((1, 5) if by == "own" and name in ("hf", "hf256") else ()), what
    assert right >= 3


REASONS = {  # what is given: what the refusal says
    "--model hf --tokenizer bytes --data text.txt": "have learned the ids",
    "--model hf --data shards-bytes": "its ids are those of bytes",
    "--model hf --data shards-own:1,shards-other:1": "shards-other: its ids are those of",
    "--model hf --data shards-other": "tokenize the text by",
    "--model hf --tokenizer long --data text.txt": "has the ids 0..4",
    "--model hf --data shards-own/tokens-00000.npy": "part of shards",
    "--model hf --data .": "part of shards",
    "--model hf --data text.txt --out hf": "is a model's folder",
    "--model bare --data text.txt": "has no tokenizer.json",
    "--model bare256 --data shards-own": "its ids are those of",
    "--tokenizer long --data text.txt": "has the ids",
}


@pytest.mark.parametrize("given", REASONS)
def test_a_refusal_says_why(begun, given):
    assert REASONS[given] in begun(given)[1]
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["own", "bytes", "ids"])
def test_a_resumed_run_keeps_its_tokenizer(tmp_path, begun, first):
    start = {"own": ("hf", "text.txt"), "bytes": ("tiny", "shards-bytes"), "ids": ("sizes.json", "rows.npy")}
    name, data = start[first]
    out, by = tmp_path / "run", "bytes" if first == "bytes" else None
    assert begun(model=name, data=data, out=out, tokenizer=by)[0]
    (out / "step-000001").mkdir()
    (out / "step-000001" / "index.json").write_text("{}")
    out = out.rename(tmp_path / "moved")
    accepted = 0
    every = [*itertools.product(GIVEN, (None, name, "hf256", "swapped"), (None, *DATA))]
    for given, other, data in random.Random(first).sample(every, 80):
        parts = [part.removeprefix("shards-") for part in parts_of(data or start[first][1])]
        same = (None, name, "swapped") if first == "ids" else (None, name)  # made here: a folder gives sizes alone
        fine = given in (None, first) and other in same and not {*parts} - {first, "rows.npy", "text.txt"}
        fine = fine and not (first == "ids" and "text.txt" in parts)
        before = (out / "run.toml").read_text()
        settings, error = begun("--resume", out=out, tokenizer=given, model=other, data=data)
        assert (settings is not None) == fine, f"{given=} {other=} {data=} {fine=}: {error}"
        if settings is None:
            assert "fix:" in error
            assert (out / "run.toml").read_text() == before
            continue
        accepted += 1
        assert {tokenizer_in(settings).identity, tokenizer_of(out, 32).identity} == {identity(first)}, data
        (out / "run.toml").write_text(before)
    assert accepted > 3


def test_files_that_were_changed_are_refused(tmp_path, begun):
    run = tmp_path / "run"
    assert begun(model="hf", data="text.txt", out=run)[0]
    shutil.copy("other/tokenizer.json", home_of(run))
    with pytest.raises(ValueError, match=r"is not the tokenizer that .*run was written with\n  fix: copy that one"):
        tokenizer_of(run, 32)
    with pytest.raises(ValueError, match=r"has the ids 0\.\.16, but .* has 16\n  fix: give the tokenizer"):
        tokenizer_of(Path("less"), 16)


@pytest.mark.parametrize("name", ["bare", "own"])
def test_weights_keep_their_ends_of_text_beside_a_tokenizer_that_was_given(tmp_path, begun, name):
    """Of a folder that has ends of text and no tokenizer.json; the tokenizer's own folder has others."""
    bare, own, run = (tmp_path / folder for folder in ("bare", "own", "run"))
    for source, folder, end in (("bare", bare, 3), (name, own, 9)):
        shutil.copytree(source, folder)
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    given = {"data": "text.txt", "tokenizer": own} if name == "own" else {"data": "rows.npy"}
    assert begun(model=bare, out=run, **given)[0]
    assert ends_of(run) == (3,)


def test_a_run_that_says_nothing_of_its_tokenizer():
    """Runs of old: bytes where there are 256 ids; a file if it is still there; else text is refused."""
    (run := Path("run.toml")).write_text('model = "tiny"\ntokenizer = "bytes"\n')
    assert tokenizer_of(Path(), 256).identity == "bytes"
    with pytest.raises(ValueError, match="fix: put the model's"):
        tokenizer_of(Path(), 300).encode("a")
    run.write_text('model = "tiny"\ntokenizer = "gone.json"\n')
    with pytest.raises(ValueError, match="no such file"):
        tokenizer_of(Path(), 300)
