"""Corpora: text, ids, chats and shards, whole and in order. Batches of them: an order of the seed alone, each sequence
once an epoch, mixtures by weight, targets that do not count. What cannot be read is named."""

import json
import random
import string
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from runs import refusal, train

from scaling.configs import get
from scaling.mesh import AbstractMesh
from scaling.models.text import ByteText
from scaling.train import corpus
from scaling.train.batches import IGNORED, Batches, Mixture, hold_out, open_batches, permuted, prefetch
from scaling.train.corpus import Corpus
from scaling.train.origin import weighted_paths
from scaling.train.settings import Settings
from scaling.train.step import batch_slices

CHATS = [
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {"prompt": "ab", "completion": "cd"},
    {"text": "plain"},
]
SOURCES = [  # files: what they hold, of it what counts, where documents begin, how many shards of 7 tokens or more
    ({"0.txt": "first ", "1.txt": "", "2.txt": "second, longer"}, "first second, longer", "all", [0, 6], 1),
    ({"a.jsonl": "\n".join(map(json.dumps, CHATS))},
     "user: 2+2?\n\nassistant: 4\n\nabcdplain", "4\n\ncdplain", [0, 26, 30], 2),
]  # fmt: skip


def said(ids) -> str:
    return bytes(ids.astype(numpy.uint8)).decode()


@pytest.mark.parametrize("shard_tokens", [0, 7, 10**8])
@pytest.mark.parametrize(("files", "text", "counts", "starts", "shards"), SOURCES, ids=["texts", "chats"])
def test_text_and_its_shards_are_documents_in_order(files, text, counts, starts, shards, shard_tokens):
    Path("data").mkdir()
    for name, content in files.items():
        Path("data", name).write_text(content)
    if shard_tokens:
        index = corpus.write_shards("data", "out", ByteText(), shard_tokens)
        assert len(index["tokens"]) == (shards if shard_tokens == 7 else 1)
        assert sorted(path.name for path in Path("out").iterdir()) == sorted([*index["bytes"], "shards.json"])
    read = corpus.open_corpus("out" if shard_tokens else "data")
    found, counted = read.between(0, len(read))
    assert said(found) == text
    assert ("all" if counted is None else said(found[counted])) == counts
    assert (read.starts.tolist(), read.top) == (starts, max(found))
    for first in range(len(text) - 9):
        assert said(read.between(first, first + 9)[0]) == text[first : first + 9]
    if shard_tokens or counts == "all":
        assert all(isinstance(part, numpy.memmap) for part in read.parts)


def test_rows_of_ids_are_mapped():
    numpy.save("a.npy", numpy.arange(5000, dtype=numpy.uint16))
    read = corpus.open_corpus("a.npy")
    assert isinstance(read.parts[0], numpy.memmap)
    assert (len(read), read.top) == (5000, 4999)
    with pytest.raises(ValueError, match=r"a.npy: token 4999 lies outside the vocabulary of tiny, 0..255"):
        open_batches(Settings(get("tiny"), "a.npy", ""))
    numpy.save("b.npy", numpy.ones((2, 2)))
    with pytest.raises(ValueError, match=r"b\.npy: not a row of token ids"):
        corpus.open_corpus(".")


def test_the_command_and_a_shard_that_is_cut_short(capsys):
    Path("a.txt").write_text("hello")
    assert train("tokenize --data a.txt --out out") == 0
    assert "5 tokens in 1 shards" in capsys.readouterr().out
    assert "is not empty" in refusal(capsys, "tokenize --data a.txt --out out")
    file = Path("out/tokens-00000.npy")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tokens-00000.npy: missing or cut short"):
        corpus.open_corpus("out")


def array_file(ids: list[int]) -> bytes:
    numpy.save(out := BytesIO(), numpy.array(ids))
    return out.getvalue()


def test_what_cannot_be_read_is_named():
    for name, content, words in [
        ("a.txt", b"", "holds no text"),
        ("a.jsonl", rb'{"text": "\uD800"}', "line 1: 'utf-8' codec can't encode"),
        ("a.jsonl", b"[" * 100_000, "line 1: maximum recursion depth"),
        ("a.jsonl", '\ufeff{"text": "x"}'.encode(), "without a byte order mark"),
        ("a.jsonl", b"{}\n", "a.jsonl, line 1: a line is"),
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "a.jsonl, line 2: Expecting value"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "line 1: a message is"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}\n', "line 1: tools and"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}\n', "line 1: tools and"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl: not UTF-8"),
        ("a.npy", b"not an array", "a.npy: cannot be read"),
        ("a.npy", array_file([3, -1, 5]), "a.npy: holds the id -1"),
        ("a.bin", b"?", "no text and no .npy"),
    ]:
        Path(name).write_bytes(content)
        with pytest.raises(ValueError, match=words):
            corpus.open_corpus(".")
        Path(name).unlink()


def test_paths_with_weights():
    assert weighted_paths("a:3,b") == [("a", 3.0), ("b", 1.0)]
    Path("a,b:2").mkdir()
    assert weighted_paths("a,b:2") == [("a,b:2", 1.0)]
    for wrong in ("a:x,b:1", "a:0,b:1", "a:nan"):
        with pytest.raises(ValueError, match="weight"):
            weighted_paths(wrong)
    for wrong in ("a,", ",a:2", ":2,a"):
        with pytest.raises(ValueError, match="names no file"):
            weighted_paths(wrong)


def chosen(mixture, seen):
    return list(zip(*map(numpy.ndarray.tolist, mixture.sequence_numbers(seen)), strict=True))


def counting(n, first=0, starts=(0,), counted=()):
    return Corpus((numpy.arange(first, first + n),), numpy.array(starts), counted)


def test_each_sequence_comes_once_an_epoch_in_an_order_of_the_seed():
    counted = numpy.arange(3000) % 3 == 0
    first, valid = hold_out(counting(3000, starts=(0, 500, 1000), counted=(counted,)), 4, 32, seed=5, valid=0.05)
    n = first.sequences
    seen = [i for step in range(n // 2) for _, i in chosen(Mixture((first,), (1,)), 4 * step)]
    assert sorted(seen[:n]) == list(range(n))
    assert seen[:n] != seen[n : 2 * n]
    other, larger = (Mixture((hold_out(counting(3000), 6, 32, seed, 0.05)[0],), (2,)) for seed in (6, 5))
    assert chosen(other, 0) != [(0, i) for i in seen[:6]]
    assert chosen(larger, 6) == [(0, i) for i in seen[6:12]]  # a batch of another size sees the same order
    for step, ((ids, targets, segments), several) in enumerate(
        islice(prefetch(Mixture((first,), (1,)), 8, 4), 5), 2
    ):  # by a thread
        assert ids[:, 0].tolist() == [32 * number for number in seen[4 * step : 4 * step + 4]]
        assert torch.equal(targets, torch.where((ids + 1) % 3 == 0, ids + 1, IGNORED))
        assert torch.equal(segments, 1 + (ids >= 500).long() + (ids >= 1000).long())
        assert several == Mixture((first,), (1,)).several_documents(4 * step)
    assert valid.first == first.last == valid.rows(range(valid.sequences))[0].min()
    short = hold_out(counting(100), 4, 32, seed=5, valid=0.05)  # of a short text at least one sequence is held out
    assert [part.sequences for part in short] == [2, 1]


def test_an_order_is_a_permutation_that_is_not_held():
    orders = {
        (count, seed): permuted(numpy.arange(count), seed, 3, count)
        for count in (*range(1, 70), 255, 256, 257, 1000, 70_000)
        for seed in (0, 1)
    }
    for (count, _), order in orders.items():
        assert numpy.array_equal(numpy.sort(order), numpy.arange(count))
    assert not numpy.array_equal(orders[1000, 0], orders[1000, 1])
    count = 1 << 60  # of which no list could be made
    places = numpy.array([0, 1, count // 2, count - 1])
    assert len({*permuted(places, 0, 0, count).tolist()} - {*places.tolist()}) == 4


def test_an_order_is_uniform():
    """Of 4,000 epochs the first two of five sequences are each pair equally often; of a long one neighbours part."""
    pairs = numpy.array([permuted(numpy.arange(2), 7, epoch, 5) for epoch in range(4000)])
    counts = numpy.bincount(pairs @ [5, 1], minlength=25).reshape(5, 5)
    found = counts[~numpy.eye(5, dtype=bool)]
    assert ((found - 200) ** 2 / 200).sum() < 43.8  # chi-squared of 19 degrees of freedom at 0.1%
    order = permuted(numpy.arange(100_000), 7, 0, 100_000)
    tenths = numpy.histogram2d(numpy.arange(100_000), order, bins=10)[0]
    assert ((tenths - 1000) ** 2 / 1000).sum() < 126.1  # and of 81
    assert abs(numpy.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02


TEXTS = [f"{letter}xyz." for letter in random.Random(0).choices(string.ascii_letters, k=400)]


@pytest.mark.parametrize("kind", ["one text", "texts", "lines", "rows of ids", "shards", "mixture"])
def test_no_target_is_of_another_document_than_its_token(kind):
    """Of 400 documents of five bytes each fifth token has no target; of one text each token has."""
    Path("data").mkdir()
    if kind == "one text":
        Path("data/a.txt").write_text("".join(TEXTS))
    elif kind == "texts":
        for i, text in enumerate(TEXTS):
            Path(f"data/{i:03}.txt").write_text(text)
    elif kind == "rows of ids":
        for i, text in enumerate(TEXTS):
            numpy.save(f"data/{i:03}.npy", numpy.frombuffer(text.encode(), numpy.uint8))
    else:
        Path("data/a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
        if kind == "shards":
            corpus.write_shards("data", "shards", ByteText(), 64)
    data = {"shards": "shards", "mixture": "data:1,data/a.jsonl:2"}.get(kind, "data")
    train, valid = open_batches(Settings(get("tiny"), data, "", 8, 32))
    for part in (*train.sources, *valid):
        for number in range(part.sequences):
            first = part.first + 32 * number
            text = "".join(TEXTS)[first : first + 33].encode()
            wanted = [IGNORED if kind != "one text" and (first + i) % 5 == 0 else text[i] for i in range(1, 33)]
            tokens, targets, _ = part.rows([number])
            assert (tokens.tolist(), targets.tolist()) == ([[*text[:-1]]], [wanted])


def test_a_mixture_is_exact_over_a_round_and_repeats_nothing_within_an_epoch():
    sources = tuple(Batches(counting(100_001, 1_000_000 * i), 10, 10, 3, 0, 100_001) for i in range(3))
    mixture = Mixture(sources, (5, 3, 2))
    found = [each for at in range(0, 2000, 10) for each in chosen(mixture, at)]
    for some, off in ((found[:1000], 0), (found[1000:], 0), (found[:200], 25)):
        counts = [sum(source == i for source, _ in some) for i in range(3)]
        assert counts == pytest.approx([len(some) * share for share in (0.5, 0.3, 0.2)], abs=off)
    assert len(set(found)) == len(found)
    assert mixture.batch_at(70)[0][3, 0] // 1_000_000 == found[73][0]
    whole = mixture.batch_at(70)
    for coord in ({"P": p, "X": x, "C": 1} for p in range(2) for x in range(5)):  # each rank reads its own rows
        rows, tokens = batch_slices(10, 10, AbstractMesh({"P": 2, "X": 5, "C": 2}, coord))
        assert (rows.start, rows.stop, tokens) == (coord["P"] * 5 + coord["X"], rows.start + 1, slice(5, 10))
        assert all(map(torch.equal, mixture.batch_at(70, rows), (x[rows] for x in whole)))
    order = Mixture(sources, (998, 1, 1)).round_order
    assert {*zip(*map(numpy.ndarray.tolist, order), strict=True)} >= {(1, 0), (2, 0)}
    with pytest.raises(ValueError, match=r"the weight 1 of 1001 is less than 1 in 1,000 sequences"):
        Mixture(sources, (998, 2, 1))


def test_text_beside_rows_of_ids_is_said_to_be_unread():
    Path("data").mkdir()
    numpy.save("data/0.npy", numpy.arange(9))
    Path("data", "tokenizer.json").write_text("{}")
    assert corpus.open_corpus("data").notes == ()
    Path("data", "a.txt").write_text("text")
    (note,) = corpus.open_corpus("data").notes
    assert note.startswith("data/a.txt: is not read, because data holds .npy files of ids\n  fix: ")
