"""Perplexity of held-out text: the same on every mesh, whatever is left for the last batch."""

import numpy
import pytest
import torch

from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train.batches import Batches
from scaling.train.corpus import Corpus
from scaling.train.evaluate import evaluate
from scaling.train.settings import Settings

TINY = get("tiny").with_(L=1, D=16, F=32, H=8, N=2, K=2)


def corpus():
    ids = numpy.random.default_rng(0).integers(0, 256, 32 * 11 + 1)
    return Corpus((ids[:200], ids[200:]), numpy.array([0, 100]))


def valid(mesh, batch, microbatches=1):
    params = transformer.shard(model.init(TINY, 0, torch.float64), TINY, mesh)
    settings = Settings(TINY, "", "", batch, 32, microbatches=microbatches, eval_batches=0)
    return evaluate(params, [Batches(corpus(), batch, 32, 0, 0, len(corpus()))], settings, mesh)


def test_the_mean_of_all_sequences_on_any_mesh(ranks):
    ids = torch.from_numpy(numpy.concatenate(corpus().parts))
    rows = torch.stack([ids[i * 32 : i * 32 + 33] for i in range(11)])
    segments = torch.zeros(11, 32, dtype=torch.int64)
    segments[3, 4:] = 1  # the second document begins at 100
    wanted = model.loss(model.init(TINY, 0, torch.float64), rows, config=TINY, segments=segments).item()
    assert valid(Mesh({"X": 1}), 11) == pytest.approx(wanted, rel=1e-12)
    assert valid(Mesh({"X": 1}), 8, 2) == pytest.approx(wanted, rel=1e-12)  # 4, 4 and 3 sequences
    for mesh in ({"X": 4}, {"Z": 1, "X": 2, "Y": 2}):
        assert ranks(valid, mesh, 4) == pytest.approx([wanted] * 4, rel=1e-12)
