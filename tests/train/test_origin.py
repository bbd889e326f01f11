"""Which tokenizer ids belong to: every pair of model, tokenizer, data and run is right or refused, none is silent."""

import json
import shutil

import numpy
import pytest

from scaling.configs import Config, get
from scaling.generate import command as generate
from scaling.models import hf
from scaling.models import transformer as model
from scaling.models.text import tokenizer, tokenizer_of
from scaling.serve.text import chat_prompt, ends_of
from scaling.train.command import main
from scaling.train.origin import options_of, tokenizer_for

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

WORDS = ["the", "types", "of", "an", "array", "say", "how", "it", "is", "split", "over", "the", "mesh"]
TEXT = " ".join(WORDS * 60)
SIZES = {"L": 1, "D": 16, "F": 24, "N": 2, "K": 2, "H": 8}
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def write_tokenizer(path, words):
    """Words as tokens, in this order: as many tokenizers as there are orders."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", *words])}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models: `hf` with its tokenizer and what comes with it, `bare` without one, `bytes` of 256 ids, `sizes.json`
    alone; tokenizers `own`, `other`, `large`; data: text, ids, and shards by each tokenizer."""
    folder = tmp_path_factory.mktemp("origin")
    own = write_tokenizer(folder / "own" / "tokenizer.json", sorted(set(WORDS)))
    other = write_tokenizer(folder / "other" / "tokenizer.json", sorted(set(WORDS), reverse=True))
    write_tokenizer(folder / "large" / "tokenizer.json", [f"w{i}" for i in range(400)])
    for name, V in (("hf", 300), ("bare", 300), ("bytes", 256)):
        config = Config(name, V=V, **SIZES)
        hf.save(folder / name, config, model.init(config, 1))
        table = json.loads((folder / name / "config.json").read_text()) | {"eos_token_id": 7, "bos_token_id": 3}
        (folder / name / "config.json").write_text(json.dumps(table))
    shutil.copy(own, folder / "hf")
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "hf" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (folder / "sizes.json").write_text(json.dumps({**SIZES, "V": 300}))
    (folder / "text.txt").write_text(TEXT)
    numpy.save(folder / "ids.npy", numpy.arange(2000) % 200)
    for name in ("own", "other", "bytes"):
        given = name if name == "bytes" else str(folder / name)
        assert main(["tokenize", "--data", str(folder / "text.txt"), "--out", str(folder / f"of_{name}"),
                     "--tokenizer", given]) == 0  # fmt: skip
    assert other.is_file()
    return folder


OK, REFUSED = True, False
PAIRS = [  # (model, --tokenizer, data) -> the tokenizer, or a word of the refusal
    ("hf", None, "text.txt", OK, "own"), ("hf", None, "of_own", OK, "own"), ("hf", "own", "text.txt", OK, "own"),
    ("hf", None, "ids.npy", OK, "own"),
    ("hf", "bytes", "text.txt", REFUSED, "have learned the ids"), ("hf", "other", "text.txt", REFUSED, "have learned"),
    ("hf", None, "of_bytes", REFUSED, "its ids are those of bytes"),
    ("hf", None, "of_other", REFUSED, "tokenize the text by"),
    ("hf", None, "of_own:1,of_other:1", REFUSED, "of_other: its ids"),
    ("hf", None, "of_own:1,text.txt:2", OK, "own"), ("hf", "large", "text.txt", REFUSED, "has the ids 0..400"),
    ("bare", None, "text.txt", REFUSED, "has no tokenizer.json"), ("bare", None, "of_own", REFUSED, "tokenizer"),
    ("bare", "own", "text.txt", OK, "own"), ("bare", None, "ids.npy", OK, ""), ("bare", "own", "of_own", OK, "own"),
    ("bytes", None, "text.txt", OK, "bytes"), ("bytes", None, "of_bytes", OK, "bytes"),
    ("bytes", None, "of_own", REFUSED, "its ids are those of"), ("bytes", None, "ids.npy", OK, "bytes"),
    ("sizes.json", None, "text.txt", OK, "bytes"), ("sizes.json", "own", "text.txt", OK, "own"),
    ("sizes.json", None, "of_own", OK, "own"),
    ("sizes.json", None, "of_own:1,of_other:1", REFUSED, "of_other: its ids"),
    ("sizes.json", "bytes", "of_own", REFUSED, "its ids are those of"), ("sizes.json", None, "ids.npy", OK, ""),
    ("sizes.json", "large", "text.txt", REFUSED, "has the ids"), ("tiny", None, "text.txt", OK, "bytes"),
    ("tiny", "large", "text.txt", REFUSED, "has the ids"),
]  # fmt: skip


def train(place, run, which, given, data, *more):
    at = [part.rpartition(":")[::2] if ":" in part else (part, "") for part in data.split(",")]
    paths = ",".join(f"{place / (path or weight)}" + (f":{weight}" if path and weight else "")
                     for path, weight in ((p, w) if p else (w, "") for p, w in at))  # fmt: skip
    model = which if which == "tiny" else str(place / which)
    options = ["--model", model, "--data", paths, "--out", str(run), "--batch", "2", "--seq", "16", "--steps", "1"]
    options += ["--tokenizer", given if given == "bytes" else str(place / given)] if given else []
    return main([*options, *more])


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_each_pair_is_right_or_refused(place, tmp_path, capsys, pair):
    which, given, data, fine, word = pair
    assert (train(place, tmp_path / "run", which, given, data) == 0) is fine
    if not fine:
        said = capsys.readouterr().err
        assert word in said
        assert "fix:" in said
        assert not (tmp_path / "run" / "run.toml").exists() or data == "text.txt"
        return
    identity = tokenizer(word if word in ("bytes",) else str(place / word)).identity if word else ""
    assert options_of(tmp_path / "run")["identity"] == identity
    config = get("tiny" if which == "tiny" else place / which)
    assert tokenizer_of(tmp_path / "run", config.V).identity == identity


@pytest.mark.slow
def test_a_run_is_whole_by_itself(place, tmp_path, capsys, monkeypatch):
    """It is begun by relative paths, moved, resumed, asked and exported from elsewhere; and begun again from there."""
    monkeypatch.chdir(place)
    begun = ["--model", "hf", "--data", "text.txt", "--out", "run", "--batch", "2", "--seq", "16"]
    assert main([*begun, "--steps", "1"]) == 0
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move("run", moved)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "hf", tmp_path / "kept")
    assert 'model = "model"' in (moved / "run.toml").read_text()

    options = ["--out", str(moved), "--resume", "--data", str(place / "text.txt"), "--steps", "2"]
    assert main(options) == 0
    assert [json.loads(line)["step"] for line in (moved / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert main([*options[:-1], "3", "--tokenizer", str(place / "other")]) == 1
    assert "was begun with another" in capsys.readouterr().err
    assert generate.main(["--model", str(moved), "--prompt", "the types", "--max-new-tokens", "3"]) == 0
    from_run = capsys.readouterr().out
    assert main(["export", str(moved), "--out", "exported"]) == 0
    capsys.readouterr()
    assert generate.main(["--model", "exported", "--prompt", "the types", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == from_run
    assert set(from_run.split()) <= {*WORDS, "?"}

    for folder in (moved, "exported"):
        assert ends_of(folder) == ends_of("kept") == (7, 9)
        assert chat_prompt(folder, [{"role": "user", "content": "hi"}]) == "[hi]"
    table = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (table["bos_token_id"], table["eos_token_id"]) == (3, 7)
    again = ["--model", "exported", "--data", str(place / "of_own"), "--out", "again", "--batch", "2", "--seq", "16"]
    assert main([*again, "--steps", "1"]) == 0


@pytest.mark.slow
def test_from_scratch_another_tokenizer_brings_no_ends_of_text(place, tmp_path):
    assert train(place, tmp_path / "run", "hf", "other", "text.txt", "--from-scratch") == 0
    assert tokenizer_of(tmp_path / "run", 300).identity == tokenizer(str(place / "other")).identity
    assert ends_of(tmp_path / "run") == ()


def test_a_run_that_says_nothing_of_its_tokenizer(tmp_path):
    """Runs of old: bytes where there are 256 ids; a file if it is still there; else text is refused."""
    (tmp_path / "run.toml").write_text('model = "tiny"\ntokenizer = "bytes"\n')
    assert tokenizer_of(tmp_path, 256).identity == "bytes"
    with pytest.raises(ValueError, match="fix: put the model's"):
        tokenizer_of(tmp_path, 300).encode("a")
    (tmp_path / "run.toml").write_text(f'model = "tiny"\ntokenizer = {json.dumps(str(tmp_path / "gone.json"))}\n')
    with pytest.raises(ValueError, match="no such file"):
        tokenizer_of(tmp_path, 300)


def test_a_mixture_of_rows_of_ids_says_no_tokenizer(place):
    data = f"{place / 'ids.npy'}:1,{place / 'ids.npy'}:2"
    config = get(place / "sizes.json")
    assert tokenizer_for(config, str(place / "sizes.json"), "", None, data, None) == ""
