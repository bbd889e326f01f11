"""Text that becomes tokens: none is cut off or padded; documents end with the tokenizer's end of text, which the last
token has as its target; and a run goes on with the ends that it began with."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

pytest.importorskip("tokenizers", reason="needs the library: pip install tokenizers")

from refused import read_table
from runs import TINY, refusal, train
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from scaling.models.template import end_of_text, ends_of
from scaling.models.text import tokenizer
from scaling.serve.requests import read_requests
from scaling.train import command
from scaling.train.batches import IGNORED, Batches
from scaling.train.corpus import open_corpus
from scaling.train.evaluate import sample_prompt
from scaling.train.origin import options_of
from scaling.train.settings import Settings

WORDS = ["<s>", "</s>", "the", "dog", "ran"]


def written(folder, **files) -> Tokenizer:
    """Write a tokenizer of words into a folder, with other files; return it as the library has it."""
    Path(folder).mkdir(exist_ok=True)
    for name, table in files.items():
        Path(folder, f"{name}.json").write_text(json.dumps(table))
    by = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="ran"))
    by.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    by.add_special_tokens(["<s>", "</s>"])
    by.save(f"{folder}/tokenizer.json")
    return by


@pytest.mark.parametrize("texts", ["short", "long"])
@pytest.mark.parametrize("which", ["truncation", "padding", "both"])
def test_a_file_s_own_truncation_and_padding_change_no_token(tmp_path, which, texts):
    """In corpora, prompts and requests; the library itself says what a text is without them."""
    loaded = written(tmp_path)
    if which != "padding":
        loaded.enable_truncation(4, stride=1)
    if which != "truncation":
        loaded.enable_padding(length=16, pad_id=1, pad_token="</s>")
    loaded.save(file := f"{tmp_path}/tokenizer.json")
    text = "the dog ran" if texts == "short" else "the dog ran " * 50
    loaded.no_truncation()
    loaded.no_padding()
    (tmp_path / "text.txt").write_text(text)
    ids = open_corpus(tmp_path / "text.txt", by := tokenizer(file)).between(0, len(text.split()))[0].tolist()
    (request,), _ = read_requests(json.dumps({"prompt": text}).encode(), by, 32, (), 1)
    assert ids == loaded.encode(text).ids
    assert list(request.request.prompt) == by.encode(text, special=True) == loaded.encode(text).ids


def test_a_tokenizer_with_dropout_cuts_a_text_the_same_way_each_time():
    """Ranks read the same corpus, each for itself."""
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)).save("tokenizer.json")
    drawn, by = Tokenizer.from_file("tokenizer.json"), tokenizer(".")
    assert len({tuple(drawn.encode("ab" * 8).ids) for _ in range(20)}) > 1
    assert {tuple(by.encode("ab" * 8)) for _ in range(20)} == {(2,) * 8}


ADDED = {"__type": "AddedToken", "content": "</s>"}
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
OWN, UNKNOWN, NONE = (CLASS | {"eos_token": text} for text in ("</s>", "<end>", None))
TABLE = """
end   options
1     tokenizer_config=OWN, generation_config={"eos_token_id": [3, 1]}
1     tokenizer_config=CLASS | {"eos_token": ADDED}, config={"eos_token_id": 4}
1     special_tokens_map={"eos_token": "</s>"}, tokenizer_config=CLASS
3     generation_config={"eos_token_id": [3, 1]}, config={"eos_token_id": 4}
4     tokenizer_config=NONE, config={"eos_token_id": 4}
None  tokenizer_config=UNKNOWN
# which is no id of this tokenizer
None  generation_config={"eos_token_id": 5}
None
"""
ENDS = read_table(TABLE, globals())


@pytest.mark.parametrize(("end", "files"), ENDS)
def test_the_end_of_text_of_a_tokenizer_is_its_own_or_else_its_model_s(end, files):
    written("own", **files)
    assert end_of_text(tokenizer("own")) == end


@pytest.mark.parametrize(("files", "words"), [
    (ENDS[5][1], "does not have the eos_token of its tokenizer_config.json, '<end>'"),
    (ENDS[6][1], "does not have the eos_token_id of its folder, 5: it has 0..4"),
    (ENDS[7][1], "nothing says which token of own/tokenizer.json ends a text"),
])  # fmt: skip
def test_why_documents_have_no_end_is_said(files, words, capsys):
    written("own", **files)
    Path("text.txt").write_text("the dog")
    assert train("tokenize --data text.txt --out shards --tokenizer own") == 0
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_tokenizer_s_own_end_of_text_is_transformers_too():
    transformers = pytest.importorskip("transformers", reason="compares with it: pip install transformers")
    for end, files in ENDS[:3]:
        written(f"own{len(files)}", **files)
        assert transformers.PreTrainedTokenizerFast.from_pretrained(f"own{len(files)}").eos_token_id == end


LINES = [{"text": "the dog"}, {"text": ""}, {"prompt": "the", "completion": "dog ran"}, {"text": "the </s>"}]
FILES = {
    "texts": ({"0.txt": "the dog", "1.txt": "", "2.txt": "ran"}, [2, 3, 1, 4, 1], [1, 1, 1, 1, 1], [0, 3]),
    "lines": (
        {"0.jsonl": "\n".join(map(json.dumps, LINES))},
        [2, 3, 1, 2, 3, 4, 1, 2, 1], [1, 1, 1, 0, 1, 1, 1, 1, 1], [0, 3, 7],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("shards", [False, True])
def test_documents_end_with_the_end_of_text_which_is_the_last_target_of_each(kind, shards):
    """The end itself has no target. What has it already gets no second one, and what is empty none."""
    written("own", tokenizer_config={"eos_token": "</s>"})
    files, ids, counted, starts = FILES[kind]
    Path("data").mkdir()
    for name, text in files.items():
        Path("data", name).write_text(text)
    if shards:
        assert train("tokenize --data data --out shards --tokenizer own") == 0
        assert json.loads(Path("shards/shards.json").read_text())["eos"] == 1
    by = tokenizer("own")
    read = open_corpus("shards" if shards else "data", by)
    found, flags = read.between(0, len(read))
    assert (found.tolist(), read.starts.tolist(), read.notes) == (ids, starts, ())
    assert (numpy.ones(len(ids)) if flags is None else flags).tolist() == counted
    _, (targets,), (segments,) = Batches(read, 1, len(ids) - 1, 0, 0, len(ids)).rows([0])
    wanted = [id if counted[i] and i not in starts else IGNORED for i, id in enumerate(ids)]
    assert targets.tolist() == wanted[1:]
    assert [i + 1 for i in range(len(ids) - 2) if segments[i] != segments[i + 1]] == starts[1:]


def test_bytes_end_with_an_id_that_is_asked_for():
    Path("data").mkdir()
    for name, text in (("0.txt", b"ab"), ("1.txt", b"c\x00"), ("2.txt", b"")):
        Path("data", name).write_bytes(text)
    for eos, ids, starts in (-1, [97, 98, 99, 0], [0, 2]), (0, [97, 98, 0, 99, 0], [0, 3]):
        assert train(f"tokenize --data data --out shards{eos} --eos-id {eos}") == 0
        for place in ("data", f"shards{eos}"):
            read = open_corpus(place, eos=eos)
            assert (read.between(0, len(read))[0].tolist(), read.starts.tolist()) == (ids, starts)
    assert open_corpus("data", eos=300).between(0, 6)[0].tolist() == [97, 98, 300, 99, 0, 300]
    assert "its documents end without an end of text, not with 0" in open_corpus("shards-1", eos=0).notes[0]


AROUND = {
    "nothing": None,
    "begin": processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)]),
    "two": processors.TemplateProcessing("<s> the $A </s>", special_tokens=[("<s>", 0), ("the", 2), ("</s>", 1)]),
    "end": processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)]),
    "Llama": processors.Sequence([
        processors.ByteLevel(), processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)]),
    ]),
    "BERT": processors.BertProcessing(("</s>", 1), ("<s>", 0)),
}  # fmt: skip
CHAT = '{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "dog"}]}'


@pytest.mark.parametrize("around", AROUND)
def test_documents_begin_as_transformers_begins_a_text_and_chats_as_their_template_does(around):
    """Shards keep the beginning that they were written with, and a run from before there was one goes on without."""
    transformers = pytest.importorskip("transformers", reason="compares with it: pip install transformers")
    template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
    by = written("own", tokenizer_config=CLASS | {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    if AROUND[around] is not None:
        by.post_processor = AROUND[around]
        by.save("own/tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained("own")
    prefix = [id for id in theirs("dog").input_ids if id != 1][:-1]
    assert prefix == {"nothing": [], "end": [], "two": [0, 2]}.get(around, [0])
    texts, counted = [*prefix, 3, 4, 1, *prefix, 2, 3, 1], [1] * len(prefix) + [1, 1, 1] + [0] * len(prefix) + [0, 1, 1]
    Path("rows.jsonl").write_text('{"text": "dog ran"}\n{"text": ""}\n{"prompt": "the", "completion": "dog"}\n' + CHAT)
    chat = theirs.apply_chat_template(json.loads(CHAT)["messages"], return_dict=False)
    assert train("tokenize --data rows.jsonl --out shards --tokenizer own") == 0
    assert train("tokenize --data rows.jsonl --out bare --tokenizer own --no-bos") == 0
    for place in ("rows.jsonl", "shards"):
        corpus = open_corpus(place, tokenizer("own"))
        ids, weights = corpus.between(0, len(corpus))
        assert ids.tolist() == [*texts, *chat, 1]
        assert weights[: len(counted)].tolist() == counted
        assert not corpus.notes
    bare = open_corpus("bare", tokenizer("own"))
    assert bare.between(0, 6)[0].tolist() == [3, 4, 1, 2, 3, 1]
    assert [f"begin with {prefix}" in note for note in bare.notes] == [True] * bool(prefix)
    settings = Settings(TINY, "shards", "run", tokenizer="own", sample="dog")
    assert [sample_prompt(each) for each in (settings, replace(settings, no_bos=True))] == [[*prefix, 3], [3]]


@pytest.fixture
def begun(monkeypatch, capsys):
    """The command with these words, up to where its ranks would start: the id that ends documents, and what it says."""
    ran = []

    def trained(settings, sizes, args, keep):
        keep()
        ran.append(settings.eos_id)
        return 0

    def begin(words: str) -> tuple[int, str]:
        assert train(f"{words} --model sizes.json --seq 4 --batch 2") == 0
        return ran.pop(), capsys.readouterr().err

    monkeypatch.setattr(command, "launch_training", trained)
    monkeypatch.setattr(command, "fits_as_before", lambda *given: True)
    Path("sizes.json").write_text(json.dumps({x: getattr(TINY.with_(V=8), x) for x in "LDFNKHV"}))
    Path("text.txt").write_text("the dog ran " * 20)
    written("own", tokenizer_config={"eos_token": "</s>"})
    written("mute")
    return begin


@pytest.mark.parametrize(("words", "eos"), [
    ("--data text.txt --tokenizer own", 1), ("--data text.txt --tokenizer own --no-eos", -1),
    ("--data text.txt --tokenizer own --eos-id 3", 3), ("--data text.txt --tokenizer own/tokenizer.json", 1),
    ("--data text.txt", -1), ("--data text.txt --eos-id 0", 0), ("--data shards", 1), ("--data shards --no-eos", -1),
    ("--data shards-3", 3), ("--data text.txt --tokenizer mute", -1),
])  # fmt: skip
def test_a_run_goes_on_with_the_end_that_it_began_with(begun, words, eos):
    """And generation stops there."""
    for name, more in {"shards": "", "shards-3": "--eos-id 3"}.items():
        assert train(f"tokenize --data text.txt --out {name} --tokenizer own {more}") == 0
    found, said = begun(words)
    assert (found, options_of(Path("run"))["eos_id"]) == (eos, eos)
    assert ("mute/tokenizer.json ends a text, so documents have no end\n  fix: put" in said) == ("mute" in words)
    assert ends_of("run") == (() if eos < 0 else (eos,))
    assert begun("--out run --resume") == (eos, "")


def test_a_run_from_before_documents_had_beginnings_goes_on_without(begun):
    begun("--data text.txt --tokenizer own")
    resumed = ["--out", "run", "--resume"]
    assert not command.arguments(resumed).no_bos
    file, lines = Path("run/run.toml"), Path("run/run.toml").read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("no_bos")))
    assert command.arguments(resumed).no_bos


def test_an_end_outside_the_vocabulary_is_refused(begun, capsys):
    assert "--eos-id 8: sizes has the ids 0..7\n  fix: give one" in refusal(
        capsys, "--model sizes.json --data text.txt --eos-id 8"
    )
