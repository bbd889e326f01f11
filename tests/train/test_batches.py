"""Batches: an order of the seed alone, each sequence once an epoch, mixtures by weight, targets that do not count."""

from itertools import islice

import numpy
import pytest
import torch

from scaling.configs import get
from scaling.train.batches import IGNORED, Batches, Mixture, ahead, hold_out, inputs
from scaling.train.corpus import Corpus
from scaling.train.origin import weighted_paths
from scaling.train.settings import Settings


def counting(n, first=0, starts=(0,), counted=()):
    return Corpus((numpy.arange(first, first + n),), numpy.array(starts), counted)


def test_each_sequence_comes_once_an_epoch_in_an_order_of_the_seed():
    train, valid = hold_out(counting(3000, starts=(0, 500, 1000)), 4, 32, seed=5)
    seen = [i for step in range(2 * train.sequences // 4) for i in train.chosen(4 * step)]
    assert sorted(seen[: train.sequences]) == list(range(train.sequences))
    assert seen[: train.sequences] != seen[train.sequences : 2 * train.sequences]
    other, _ = hold_out(counting(3000), 4, 32, seed=6)
    assert [i for step in range(3) for i in other.chosen(4 * step)] != seen[:12]
    inputs, targets, segments = train.at(12)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(segments, 1 + (inputs >= 500).long() + (inputs >= 1000).long())
    assert valid.first == train.last
    assert min(valid.rows(range(valid.sequences))[0].flatten().tolist()) == train.last
    train, valid = hold_out(counting(100), 4, 32, seed=5)  # of a short text at least one sequence is held out
    assert (train.sequences, valid.sequences) == (2, 1)


def test_other_batch_sizes_see_the_same_order():
    small, large = (Batches(counting(3000), batch, 32, 0, 0, 3000) for batch in (2, 6))
    assert [i for at in (4, 6, 8) for i in small.chosen(at)] == large.chosen(4)


def test_targets_that_do_not_count():
    counted = numpy.arange(100) % 3 == 0
    tokens, targets, _ = Batches(counting(100, counted=(counted,)), 1, 9, 0, 0, 100).row(1)
    assert tokens.tolist() == list(range(9, 18))
    assert targets.tolist() == [t if t % 3 == 0 else IGNORED for t in range(10, 19)]


def test_a_mixture_is_exact_over_a_round_and_repeats_nothing_within_an_epoch():
    sources = tuple(Batches(counting(100_001, 1_000_000 * i), 10, 10, 3, 0, 100_001) for i in range(3))
    mixture = Mixture(sources, (5, 3, 2))
    found = [each for at in range(0, 2000, 10) for each in mixture.chosen(at)]
    for some in (found[:1000], found[1000:]):
        assert [sum(source == i for source, _ in some) for i in range(3)] == [500, 300, 200]
    assert len(set(found)) == len(found)
    early = [sum(source == i for source, _ in found[:200]) for i in range(3)]
    assert early == pytest.approx([100, 60, 40], abs=25)
    assert mixture.at(70)[0][3, 0] // 1_000_000 == found[73][0]


def test_read_ahead_they_are_the_same():
    source = Batches(counting(3000), 4, 32, 0, 0, 3000)
    for i, batch in enumerate(islice(ahead(source, 8, 4), 5)):
        assert all(torch.equal(a, b) for a, b in zip(batch, source.at(8 + 4 * i), strict=True))


def test_paths_with_weights(tmp_path):
    assert weighted_paths("a:3,b") == [("a", 3.0), ("b", 1.0)]
    (tmp_path / "a,b:2").mkdir()
    assert weighted_paths(str(tmp_path / "a,b:2")) == [(str(tmp_path / "a,b:2"), 1.0)]
    for wrong in ("a:x,b:1", "a:0,b:1", "a:nan"):
        with pytest.raises(ValueError, match="weight"):
            weighted_paths(wrong)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.full(5000, 256))
    with pytest.raises(ValueError, match=r"ids.npy: token 256 lies outside the vocabulary of tiny, 0..255"):
        inputs(Settings(get("tiny"), str(tmp_path / "ids.npy"), ""))
