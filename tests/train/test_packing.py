"""Documents of which some tokens do not count are packed whole into rows: each once an epoch, and with its prompt."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from runs import ONE, TINY, losses

from scaling.models import transformer
from scaling.train import loop
from scaling.train.batches import IGNORED, Batches, hold_out
from scaling.train.corpus import Corpus
from scaling.train.packing import best_fit, pack
from scaling.train.settings import Settings


def documents_at_random(seed: int) -> Corpus:
    """Prompts with completions, plain texts and documents of which nothing counts; of 1 to 60 tokens."""
    draw = numpy.random.default_rng(seed)
    lengths = draw.integers(1, 60, 80)
    prompts = (draw.random(80) * (lengths + 1)).astype(int) * draw.integers(0, 2, 80)
    counted = numpy.concatenate([numpy.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)])
    starts = numpy.cumsum([0, *lengths[:-1]])
    return Corpus((numpy.arange(lengths.sum()) + 1,), starts, (counted,))


@pytest.mark.parametrize("seed", range(6))
def test_where_some_tokens_do_not_count_documents_are_whole_in_a_row_and_each_comes_once(seed):
    corpus, T = documents_at_random(seed), 32
    train, valid = hold_out(corpus, 4, T, seed, 0.05, whole=True)
    assert train.last == valid.first
    assert valid.first in corpus.starts
    found, ends = [], [*corpus.starts[1:], len(corpus)]
    for part in (train, valid):
        tokens, targets, segments = (x.numpy() for x in part.rows(range(part.sequences)))
        assert part.several_documents(numpy.arange(part.sequences)) == any(len({*row} - {81}) > 1 for row in segments)
        for row, document in {(i, int(d)) for i, d in numpy.ndenumerate(segments) for i in [i[0]]}:
            place = numpy.flatnonzero(segments[row] == document)
            assert (numpy.diff(place) == 1).all()
            ids, wanted = tokens[row, place], targets[row, place]
            if document == 81:  # what is left of a row
                assert not ids.any()
                assert (wanted == IGNORED).all()
                continue
            first, last = corpus.starts[document - 1], ends[document - 1]
            all_count = corpus.counted[0][first:last].all()
            assert (ids == numpy.arange(ids[0], ids[0] + len(ids))).all()  # token i + 1 is at position i
            assert ids[0] == first + 1 or all_count
            assert len(ids) == min(last - first - 1, T) or all_count
            counts = corpus.counted[0][ids]
            assert (wanted == numpy.where(counts, ids + 1, IGNORED)).all()
            found += wanted[counts].tolist()
    assert len(found) == len({*found})
    parts = [range(first, last) for first, last in zip(corpus.starts, ends, strict=True)]
    reach = [len(part) if corpus.counted[0][part].all() else T + 1 for part in parts]
    kept = [i + 1 for part, n in zip(parts, reach, strict=True) for i in part[1:n] if corpus.counted[0][i]]
    assert sorted(found) == kept
    lost = sum(corpus.counted[0][part[1:]].sum() for part in parts) - len(kept)
    assert train.packing.lost + valid.packing.lost == lost
    held = ((0, 40), (200, 201))
    rows = replace(train, without=held).rows(replace(train, without=held).places)[0]
    seen = set(rows.flatten().tolist()) - {0}
    assert not seen & {i + 1 for first, last in held for i in range(first, last)}
    assert len(rows) < train.sequences


def test_more_is_held_out_where_nothing_counts_in_the_last_documents():
    """The last prompts are longer than a row: the document before them is the held-out end, not an error."""
    lengths, prompts = [10, 8, 6, 30, 1], [5, 3, 2, 25, 0]
    counted = numpy.concatenate([numpy.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)])
    corpus = Corpus((numpy.arange(55),), numpy.cumsum([0, *lengths[:-1]]), (counted,))
    train, valid = hold_out(corpus, 2, 16, 0, 0.05, whole=True)
    assert (train.last, train.sequences, valid.first, valid.sequences) == (18, 1, 18, 1)
    assert sorted(valid.rows([0])[1][0].tolist())[-4:] == [20, 21, 22, 23]


def test_best_fit_is_that_of_a_search_through_all_rows():
    sizes = numpy.random.default_rng(0).integers(1, 33, 300)
    rows, left = best_fit(sizes, 32), []
    for size in sorted(sizes.tolist(), reverse=True):
        room, row = min(((room, row) for row, room in enumerate(left) if room >= size), default=(32, len(left)))
        left[row : row + 1] = [room - size]
    assert sorted(32 - numpy.bincount(rows, weights=sizes)) == sorted(left)


def test_the_loss_of_packed_rows_is_the_mean_over_the_tokens_of_documents_alone():
    corpus, T, config = documents_at_random(1), 32, TINY.with_(V=4000, name="wide")
    packed = Batches(corpus, 1, T, 0, 0, len(corpus), packing=pack(corpus, 0, len(corpus), T))
    params = transformer.init(config, 0, torch.float64)
    tokens, targets, segments = packed.rows(range(packed.sequences))
    found = transformer.loss(params, tokens, config=config, targets=targets, segments=segments)
    total, count = 0.0, 0
    for start, size in (piece for row in range(packed.sequences) for piece in packed.packing.row(row)):
        ids, counted = corpus.between(start, start + size + 1)
        weights = torch.from_numpy(counted[1:].astype(float))[None]
        alone = torch.from_numpy(ids)[None]
        total += transformer.loss(params, alone, config=config, weights=weights).item() * weights.sum().item()
        count += int(weights.sum())
    assert found.item() == pytest.approx(total / count, rel=1e-12)


def test_a_run_keeps_the_rows_that_it_began_with(monkeypatch):
    """A run from before documents were packed does not say "packed" in its record."""
    lines = [json.dumps({"prompt": "q" * (i % 9), "completion": "a" * (i % 7)}) for i in range(80)]
    Path("chats.jsonl").write_text("\n".join(lines))
    opened, opens, load = [], loop.open_batches, loop.load_or_init
    monkeypatch.setattr(loop, "open_batches", lambda *given: opened.append(given[1]) or opens(*given))
    settings = Settings(TINY, str(Path("chats.jsonl").absolute()), str(Path("run").absolute()), 2, 16, steps=2)
    for out, steps in ("run", (2, 4)), ("whole", (4,)):
        Path(out).mkdir()
        for last in steps:
            loop.run(ONE, replace(settings, out=out, schedule="constant", steps=last, resume=last > steps[0]))
    assert opened == [True, True, True]
    assert losses("run") == losses("whole")

    def before_packing(*given):
        state, step, record = load(*given)
        return state, step, {key: record[key] for key in record if key != "packed"}

    monkeypatch.setattr(loop, "load_or_init", before_packing)
    loop.run(ONE, replace(settings, schedule="constant", steps=5, resume=True))
    monkeypatch.setattr(loop, "load_or_init", load)
    loop.run(ONE, replace(settings, schedule="constant", steps=6, resume=True))
    assert opened[3:] == [False, False]
