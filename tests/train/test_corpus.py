"""Corpora: text, ids, chats and shards, whole and in order; what cannot be read is named."""

import json
import os

import numpy
import pytest

from scaling.models.text import ByteText
from scaling.train import corpus, tokenize


def ids(read):
    return read.between(0, len(read))[0]


def test_text_files_are_documents_mapped_into_memory(tmp_path):
    texts = ["first ", "", "second, longer"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    read = corpus.open_corpus(tmp_path)
    assert bytes(ids(read).astype(numpy.uint8)).decode() == "".join(texts)
    assert read.starts.tolist() == [0, 6]
    assert all(isinstance(part, numpy.memmap) for part in read.parts)
    assert bytes(read.between(4, 9)[0].astype(numpy.uint8)) == b"t sec"


def test_rows_of_ids_are_mapped(tmp_path):
    numpy.save(tmp_path / "a.npy", numpy.arange(1000, dtype=numpy.uint16))
    read = corpus.open_corpus(tmp_path / "a.npy")
    assert isinstance(read.parts[0], numpy.memmap)
    assert (len(read), read.top) == (1000, 999)
    numpy.save(tmp_path / "b.npy", numpy.ones((2, 2)))
    with pytest.raises(ValueError, match=r"b\.npy: not a row of token ids"):
        corpus.open_corpus(tmp_path)


CHATS = [
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {"prompt": "ab", "completion": "cd"},
    {"text": "plain"},
]


def lines(folder):
    (path := folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CHATS))
    return path


def test_prompts_do_not_count(tmp_path):
    read = corpus.open_corpus(lines(tmp_path))
    found, counted = read.between(0, len(read))
    assert bytes(found.astype(numpy.uint8)).decode() == "user: 2+2?\n\nassistant: 4\n\nabcdplain"
    assert bytes(found[counted].astype(numpy.uint8)).decode() == "4\n\ncdplain"
    assert read.starts.tolist() == [0, 26, 30]


@pytest.mark.parametrize("shard_tokens", [7, 20, 10**8])
def test_shards_are_the_text_again(tmp_path, shard_tokens):
    source = lines(tmp_path)
    index = tokenize.write_shards(source, tmp_path / "out", ByteText(), shard_tokens)
    whole, again = corpus.open_corpus(source), corpus.open_corpus(tmp_path / "out")
    assert len(index["tokens"]) == {7: 2, 20: 1, 10**8: 1}[shard_tokens] + (shard_tokens == 20)
    for first, last in ((0, len(whole)), (20, 33), (25, 27)):
        for a, b in zip(whole.between(first, last), again.between(first, last), strict=True):
            assert a.tolist() == b.tolist()
    assert again.starts.tolist() == whole.starts.tolist()
    assert again.top == whole.top


def test_shards_of_plain_text_carry_no_mask(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    assert tokenize.main(["--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 0
    assert "5 tokens in 1 shards" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["shards.json", "starts.npy", "tokens-00000.npy"]
    assert tokenize.main(["--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 1
    assert "is not empty" in capsys.readouterr().err
    file = tmp_path / "out" / "tokens-00000.npy"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tokens-00000.npy: missing or cut short"):
        corpus.open_corpus(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.jsonl", b"{}\n", r"a.jsonl, line 1: a line is"),
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', r"a.jsonl, line 2: Expecting value"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', r"line 1: a message is"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl: not UTF-8"),
        ("a.npy", b"not an array", "a.npy: cannot be read"),
        ("a.bin", b"?", "no text and no .npy"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        corpus.open_corpus(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(PermissionError, match=r"a\.txt"):
        corpus.open_corpus(tmp_path)
