"""Which tokenizer belongs to which ids: each (model, tokenizer, data, run) is right or refused, none is silent. A run's
folder is whole by itself, and so is what is exported of it, by one process or several."""

import itertools
import json
import os
import random
import shlex
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from problems import same
from refused import named

pytest.importorskip("tokenizers", reason="tables of tokenizers need the library: pip install tokenizers")
pytest.importorskip("safetensors")

import tokenizers
from runs import records, refusal, train, write_text
from tokenizers import Tokenizer

from scaling.configs import Config
from scaling.models import hf, transformer
from scaling.models.template import chat_template, ends_of
from scaling.models.text import home_of, tokenizer, tokenizer_of, write_bytes
from scaling.serve import command as serve
from scaling.serve import generate_command as generating
from scaling.train import command
from scaling.train.origin import options_of, tokenizer_in

LINE = "the cat sat on a mat and the dog ran to us in time for tea "
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64}
WORDS = ["<s>", "</s>", *dict.fromkeys(LINE.split())]
TEMPLATE = "{{ bos_token }}{% for m in messages %}the {{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %} a{% endif %}"


def model(V):
    return Config("small", L=1, D=16, F=24, N=4, K=2, H=4, V=V)


def make(here):
    """Write models, tokenizers and data of every kind into a folder."""
    long = [*WORDS, *map(str, range(400))]
    for name, some in {"own": WORDS, "other": WORDS[:2] + WORDS[:1:-1], "long": long}.items():
        (here / name).mkdir()
        by = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(some)}, unk_token=some[-1]))
        by.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        by.add_special_tokens(["<s>", "</s>"])
        by.save(f"{here}/{name}/tokenizer.json")
    for name, V in {"hf": 32, "bare": 32, "hf256": 256, "bare256": 256, "less": 16}.items():
        hf.save(here / name, model(V), transformer.init(model(V), 1))
        if not name.startswith("bare"):
            shutil.copy(here / "own" / "tokenizer.json", here / name)
            said = json.loads((here / name / "config.json").read_text()) | ENDS
            (here / name / "config.json").write_text(json.dumps(said))
            (here / name / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [1, 5]}')
            special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "tea"}
            (here / name / "special_tokens_map.json").write_text(json.dumps(special))
            table = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE} | special
            (here / name / "tokenizer_config.json").write_text(json.dumps(table))
    hf.save(here / "room", model(300), transformer.init(model(300), 1))  # an export of bytes, with ids that are none
    write_bytes(here / "room")
    shutil.copytree(here / "hf", here / "swapped")
    shutil.copy(here / "other" / "tokenizer.json", here / "swapped")
    (here / "sizes.json").write_text(json.dumps({x: getattr(model(32), x) for x in "LDFNKHV"}))
    (here / "text.txt").write_text(LINE * 40)
    numpy.save(here / "rows.npy", numpy.arange(2000) % 16)
    for name in ("bytes", "own", "other"):
        by = name if name == "bytes" else here / name
        assert train(f"tokenize --data {here}/text.txt --out {here}/shards-{name} --tokenizer {by}") == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of models, tokenizers and data, for all tests here."""
    make(here := tmp_path_factory.mktemp("place"))
    return here


# name: (its vocabulary, its own tokenizer, whether it has weights)
MODEL = named(
    """
name            its vocabulary, its own tokenizer, whether it has weights
hf              (32, "own", True)
bare            (32, None, True)
hf256           (256, "own", True)
bare256         (256, None, True)
less            (16, "own", True)
sizes.json      (32, None, False)
hf/config.json  (32, "own", False)
tiny            (256, None, False)
room            (300, "bytes", True)
""",
    globals(),
)
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
    monkeypatch.setattr(
        command, "launch_training", lambda settings, sizes, args, keep: ran.append(settings) or keep() or 0
    )
    monkeypatch.setattr(command.dry, "refuse_too_large", lambda *given: None)
    monkeypatch.setattr(command.evaluate, "check_sample", lambda *given: None)
    monkeypatch.setattr(command, "fits_as_before", lambda *given: True)
    ran = []

    def begin(line: str = "", **more):
        """With --model, --tokenizer, --data and --out of what is given."""
        words = [f"--{name} {value}" for name, value in more.items() if value is not None]
        code = train(" ".join([line, *words, "--seq 8 --batch 2"]))
        return (ran.pop(), "") if code == 0 else (None, capsys.readouterr().err)

    return begin


def identity(by):
    return "" if by == "ids" else tokenizer(by).identity


def of_both(cases, right, seed):
    """Ten that are right, or all there are, and ten that are not."""
    drawn = random.Random(seed).sample(cases, len(cases))
    return [case for fine in (True, False) for case in [case for case in drawn if right(case) == fine][:10]]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL)
def test_every_pair_is_right_or_refused(tmp_path, begun, name):
    every = [*itertools.product((False, True), GIVEN, DATA)]
    some = of_both(every, lambda case: expected(name, *case) is not None, name)
    for i, (scratch, given, data) in enumerate(some):
        by, out = expected(name, scratch, given, data), tmp_path / str(i)
        settings, error = begun("--from-scratch" * scratch, model=name, data=data, out=out, tokenizer=given)
        what = f"{scratch=} {given=} {data}: {by=} {error}"
        assert (settings is None) == (by is None), what
        if settings is None:
            assert "fix:" in error
            assert not out.exists(), what
            continue
        found = {tokenizer_in(settings).identity, tokenizer_of(out, MODEL[name][0]).identity}
        assert found | {options_of(out)["identity"]} == {identity(by)}, what
        assert ends_of(out) == ((1, 5) if by == "own" and name in ("hf", "hf256") else ()), what


@pytest.mark.parametrize(("given", "words"), [
    ("--model hf --tokenizer bytes --data text.txt", "have learned the ids"),
    ("--model hf --data shards-bytes", "its ids are those of bytes"),
    ("--model hf --data shards-own:1,shards-other:1", "shards-other: its ids are those of"),
    ("--model hf --data shards-other", "tokenize the text by"),
    ("--model hf --tokenizer long --data text.txt", "has the ids 0..4"),
    ("--model hf --data shards-own/tokens-00000.npy", "part of shards"),
    ("--model hf --data .", "part of shards"),
    ("--model hf --data text.txt --out hf", "is a model's folder"),
    ("--model hf --data text.txt --out text.txt", "is not a folder"),
    ("--model bare --data text.txt", "has no tokenizer.json"),
    ("--model bare256 --data shards-own", "its ids are those of"),
    ("--tokenizer long --data text.txt", "has the ids"),
])  # fmt: skip
def test_a_refusal_says_why(begun, given, words):
    assert words in begun(given)[1]
    assert not Path("run").exists()


START = {"own": ("hf", "text.txt"), "bytes": ("tiny", "shards-bytes"), "ids": ("sizes.json", "rows.npy")}


@pytest.mark.slow
@pytest.mark.parametrize("first", START)
def test_a_resumed_run_keeps_its_tokenizer(tmp_path, begun, first):
    name, data = START[first]
    assert begun(model=name, data=data, out=tmp_path / "run", tokenizer="bytes" if first == "bytes" else None)[0]
    out = (tmp_path / "run").rename(tmp_path / "moved")
    before = (out / "run.toml").read_text()
    same = (None, name, "swapped") if first == "ids" else (None, name)  # made here: a folder gives sizes alone
    read = {first, "rows.npy"} if first == "ids" else {first, "rows.npy", "text.txt"}
    every = [*itertools.product(GIVEN, (None, name, "hf256", "swapped"), (None, *DATA))]

    def right(case):
        given, other, data = case
        parts = {part.removeprefix("shards-") for part in parts_of(data or START[first][1])}
        return given in (None, first) and other in same and parts <= read

    for given, other, data in of_both(every, right, first):
        fine = right((given, other, data))
        settings, error = begun("--resume", out=out, tokenizer=given, model=other, data=data)
        assert (settings is not None) == fine, f"{given=} {other=} {data=} {fine=}: {error}"
        if settings is None:
            assert "fix:" in error
            assert (out / "run.toml").read_text() == before
            continue
        assert {tokenizer_in(settings).identity, tokenizer_of(out, 32).identity} == {identity(first)}, data
        (out / "run.toml").write_text(before)


@pytest.mark.parametrize("name", ["bare", "own"])
def test_weights_keep_their_ends_of_text_beside_a_tokenizer_that_was_given(tmp_path, begun, name):
    """Of a folder that has ends of text and no tokenizer.json; the tokenizer's own folder has others, with which the
    documents end. A chat template is the tokenizer's, before the run is resumed and after."""
    bare, own, run = (tmp_path / folder for folder in ("bare", "own", "run"))
    for source, folder, end in (("bare", bare, 3), (name, own, 9)):
        shutil.copytree(source, folder)
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    (bare / "chat_template.jinja").write_text("the weights'")
    given = {"data": "text.txt", "tokenizer": own} if name == "own" else {"data": "rows.npy"}
    assert begun(model=bare, out=run, **given)[0]
    assert (chat_template(run) is None) == (name == "own")
    assert ends_of(run) == ((3, 9) if name == "own" else (3,))


def test_tokenizers_that_are_gone_changed_or_not_named(tmp_path, begun, monkeypatch):
    """Runs of old say nothing: bytes where there are 256 ids; a file if it is still there; else text is refused."""
    assert begun(model="hf", data="text.txt", out=tmp_path / "run")[0]
    shutil.copy("other/tokenizer.json", home_of(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"is not the tokenizer that .*run was written with\n  fix: copy that one"):
        tokenizer_of(tmp_path / "run", 32)
    with pytest.raises(ValueError, match=r"has the ids 0\.\.16, but .* has 16\n  fix: give the tokenizer"):
        tokenizer_of(Path("less"), 16)
    monkeypatch.chdir(tmp_path)
    (run := Path("run.toml")).write_text('model = "tiny"\ntokenizer = "bytes"\n')
    assert tokenizer_of(Path(), 256).identity == "bytes"
    with pytest.raises(ValueError, match="fix: put the model's"):
        tokenizer_of(Path(), 300).encode("a")
    run.write_text('model = "tiny"\ntokenizer = "gone.json"\n')
    with pytest.raises(ValueError, match="no such file"):
        tokenizer_of(Path(), 300)


def generate(line: str) -> int:
    return generating.main(shlex.split(line))


@pytest.mark.slow
def test_a_run_is_whole_by_itself(place, capsys):
    """Trained by relative paths, moved, its model gone: resumed, asked, served and exported from elsewhere."""
    shutil.copytree(place / "hf", "hf")
    small = "--seq 8 --batch 2 --eval-batches 1"
    assert train(f"--model hf --data {place}/text.txt {small} --steps 2 --sample 'the dog'") == 0
    shutil.rmtree("hf")
    shutil.move("run", "moved")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    assert 'model = "model"' in Path("../moved/run.toml").read_text()
    assert train("--out ../moved --resume --steps 3") == 0
    other = f"--out ../moved --resume --steps 4 --tokenizer {place}/other"
    assert "was begun with another" in refusal(capsys, other)
    assert train("export ../moved --out out") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert Path("out", name).read_bytes() == (place / "hf" / name).read_bytes()
    table = json.loads(Path("out/config.json").read_text())
    assert (table["bos_token_id"], table["eos_token_id"], table["max_position_embeddings"]) == (0, 1, 64)
    assert table["tokenizer"] == "hf/tokenizer.json"
    assert table["tokenizer_identity"] == tokenizer(str(place / "hf")).identity
    shutil.copytree("out", "changed")
    (template := Path("changed/chat_template.jinja")).write_text("another model's")
    assert "chat_template.jinja: is another model's" in refusal(capsys, "export ../moved --out changed")
    template.unlink()
    shutil.copy(place / "other" / "tokenizer.json", "changed")
    assert generate("--model changed --prompt the") == 1
    said = []
    Path("requests").write_text('{"prompt": "the dog ran"}\n{"ids": [2, 3], "stop": "cat"}\n')
    for folder in ("../moved", "out"):
        assert ends_of(folder) == ends_of(place / "hf") == (1, 5)
        template = chat_template(folder)
        assert template is not None
        chat = template.render([{"role": "user", "content": "dog"}], add_generation_prompt=True)
        assert chat == "<s>the dog a"
        capsys.readouterr()
        for more in ("--chat", "--score", "--ignore-eos"):
            assert generate(f"--model {folder} --prompt 'the dog' --max-new-tokens 8 {more}") == 0
        assert serve.main(["--model", folder, "--input", "requests", "--output", "answers"]) == 0
        rows = records(".", "answers")
        said.append((capsys.readouterr().out.split("2 of 2")[0], [(row["text"], row["ids"]) for row in rows]))
    assert said[0] == said[1]
    assert {*rows[0]["text"].split()} <= {*WORDS}  # words, not bytes
    assert train(f"--model out --data {place}/shards-own --out again {small} --steps 1") == 0


@pytest.mark.slow
def test_a_run_on_bytes_is_exported_by_one_process_and_by_several(capsys):
    """From another mesh; the tokenizer is of the 256 bytes."""
    write_text(500)
    assert train("--data text.txt --batch 2 --seq 32 --steps 2 --mesh X=2") == 0
    for name, mesh in (("one", "X=1"), ("two", "Z=2")):
        assert train(f"export run --out {name} --mesh {mesh}") == 0
    assert "step 2: two" in capsys.readouterr().out
    (config, params), (_, again) = map(hf.load, ("one", "two"))
    assert (config.L, config.V) == (4, 256)
    assert same(params, again)
    for given, said in ((".", "run.toml"), ("run --mesh Z=5", "L=4 layers cannot fill 5 stages\n  fix: ")):
        assert said in refusal(capsys, f"export {given} --out no")
    by, text = Tokenizer.from_file("one/tokenizer.json"), " a\tb\n\nÄ€😀\x7f  "
    assert sorted(by.get_vocab().values()) == list(range(256))
    assert by.encode(text).ids == list(text.encode())
    assert by.decode(list(text.encode())) == text


def test_ids_without_a_tokenizer(place, capsys):
    """Can be gone on from as numbers; text is refused."""
    assert generate(f"--model {place}/bare --prompt the") == 1
    assert "fix: put the model's tokenizer.json there" in capsys.readouterr().err
    Path("in").write_text('{"prompt": "the"}\n{"ids": [2, 3], "max_new_tokens": 2}\n{"ids": [2], "stop": "a"}\n')
    assert serve.main(["--model", f"{place}/bare", "--input", "in", "--output", "out"]) == 0
    rows = records(".", "out")
    assert ["error" in row for row in rows] == [True, False, True]
    assert (rows[1]["text"], len(rows[1]["ids"])) == ("", 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_transformers_pipeline_behaves_as_before(place):
    transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install transformers")
    given = f"--model {place}/hf --data {place}/text.txt --lr 0 --steps 1 --seq 8 --batch 2 --eval-batches 1"
    assert train(given) == train("export run --out out") == 0
    said = []
    for folder in (place / "hf", "out"):
        pipe = transformers.pipeline("text-generation", model=str(folder), dtype=torch.float32)
        chat = pipe([{"role": "user", "content": "dog"}], max_new_tokens=12, do_sample=False)[0]["generated_text"]
        plain = pipe("the dog", max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
        ends = pipe.model.generation_config.eos_token_id, pipe.model.config.eos_token_id, pipe.model.config.bos_token_id
        said.append((chat, plain, ends, pipe.tokenizer.eos_token, pipe.tokenizer.chat_template))
    assert said[0] == said[1]
