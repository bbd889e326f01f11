"""Batches of real text: the same rows in the same order on every mesh, each row once an epoch."""

import math

import pytest
import torch
from torch.utils.data import DistributedSampler

from scaling import data
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError

K, BATCH = 3, 8
TEXT = (torch.arange(100) * 7 % 251).to(torch.uint8)  # bytes all differ, so a row's first byte names it


def epoch_of(mesh=None, epoch=0, seed=0, axes=("X",)):
    return list(data.batches(TEXT, K, BATCH, mesh, axes, seed, epoch))


def coords(x, y):
    return [AbstractMesh({"X": x, "Y": y}, {"X": i, "Y": j}) for i in range(x) for j in range(y)]


def test_a_row_is_a_context_and_the_next_byte():
    for context, target in epoch_of():
        assert context.shape == (BATCH, K)
        assert target.shape == (BATCH,)
        assert context.dtype == target.dtype == torch.int64
        for row, next_byte in zip(context, target, strict=True):
            start = TEXT.tolist().index(row[0])
            assert TEXT[start : start + K + 1].tolist() == [*row.tolist(), next_byte]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize(
    ("x", "y", "axes"), [(1, 1, "X"), (2, 1, "X"), (4, 2, "X"), (4, 2, "Y"), (2, 4, "XY"), (2, 2, "YX")]
)
def test_the_devices_parts_make_up_the_one_device_batch(x, y, axes, epoch):
    whole = epoch_of(epoch=epoch)
    parts = [(at, epoch_of(at, epoch, axes=tuple(axes))) for at in coords(x, y)]
    for step, (context, target) in enumerate(whole):
        found = {}
        for at, batches in parts:
            block = 0
            for axis in axes:
                block = block * at.sizes[axis] + at.coord[axis]
            if block in found:  # another device along an axis that does not split B
                assert torch.equal(found[block][0], batches[step][0])
            found[block] = batches[step]
        assert torch.equal(torch.cat([found[b][0] for b in sorted(found)]), context)
        assert torch.equal(torch.cat([found[b][1] for b in sorted(found)]), target)


def test_an_epoch_holds_each_row_at_most_once_and_epochs_differ():
    firsts = [
        torch.cat([context[:, 0] for context, _ in epoch_of(epoch=e, seed=s)]) for e, s in ((0, 0), (1, 0), (0, 1))
    ]
    for first in firsts:
        assert len(first.unique()) == len(first) == (len(TEXT) - K) // BATCH * BATCH
        assert not torch.equal(first, first.sort().values)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(firsts[a], firsts[b])
    assert torch.equal(firsts[0], torch.cat([context[:, 0] for context, _ in epoch_of()]))


def test_the_epochs_have_the_length_that_distributed_sampler_gives():
    x = 4
    loader = data.batches(TEXT, K, BATCH, AbstractMesh({"X": x}, {"X": 1}))
    theirs = DistributedSampler(loader.dataset, num_replicas=x, rank=1, drop_last=True)
    assert len(loader) == len(theirs) // (BATCH // x)


def test_reading_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    epoch_of()
    assert torch.equal(before, torch.get_rng_state())


def test_endless_goes_on_with_the_next_epoch():
    mesh = AbstractMesh({"X": 2}, {"X": 1})
    stream = data.endless(TEXT, K, BATCH, mesh)
    for epoch in range(3):
        for context, target in epoch_of(mesh, epoch):
            found = next(stream)
            assert torch.equal(found[0], context)
            assert torch.equal(found[1], target)


def test_the_default_text_is_pythons_own_source():
    text = data.load_text()
    assert text.dtype == torch.uint8
    assert 1_000_000 < len(text) <= data.MAX_BYTES
    assert bytes(text.numpy()).count(b"import ") > 1000
    assert torch.equal(text, data.load_text())
    assert torch.equal(data.load_text(max_bytes=1234), text[:1234])
    assert 4 < data.order0_entropy(text) < 5.5


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert bytes(data.load_text(tmp_path / "a.txt").tolist()) == b"hello"
    assert bytes(data.load_text(tmp_path / "a.txt", max_bytes=2).tolist()) == b"he"
    train, valid = data.split(data.load_text(tmp_path / "a.txt"), 0.4)
    assert (bytes(train.tolist()), bytes(valid.tolist())) == (b"hel", b"lo")


def test_order0_entropy():
    assert data.order0_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(8, abs=1e-12)
    assert data.order0_entropy(torch.zeros(9, dtype=torch.uint8)) == 0
    skewed = torch.tensor([65, 65, 65, 66], dtype=torch.uint8)
    assert data.order0_entropy(skewed) == pytest.approx(0.25 * math.log2(4) + 0.75 * math.log2(4 / 3), abs=1e-12)


def test_errors(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no text at .*missing.txt"):
        data.load_text(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="empty' holds no text"):
        data.load_text(tmp_path / "empty")
    with pytest.raises(ValueError, match="valid_fraction"):
        data.split(TEXT, 1.0)
    with pytest.raises(ValueError, match=r"text of 3 bytes .* k=3"):
        data.batches(TEXT[:3], K, 1)
    with pytest.raises(ValueError, match=r"text of 9 bytes .* k=0"):
        data.Windows(TEXT[:9], 0)
    assert len(data.Windows(TEXT[:2], 1)) == 1
    with pytest.raises(ValueError, match="a batch of 98 rows cannot be drawn from 97"):
        data.batches(TEXT, K, 98)
    with pytest.raises(ShardingError, match=r"B of size 8 does not divide into 3 blocks"):
        data.batches(TEXT, K, BATCH, AbstractMesh({"X": 3}))
    with pytest.raises(ShardingError, match="unknown mesh axis X"):
        data.batches(TEXT, K, BATCH, AbstractMesh({"Y": 2}))


def test_every_seed_and_epoch_has_an_order_of_its_own():
    """Also pairs that a sum of multiples would confuse, and numbers beyond 64 bits."""
    pairs = [
        (0, 1_000_003),
        (1, 0),
        (0, 1),
        (1, 1),
        (12, 3),
        (1, 23),
        (0, 2**63),
        (2**63, 0),
        (2**64, 0),
        (-1, 0),
        (0, 0),
    ]
    orders = [tuple(torch.cat([*data.BatchRows(97, 8, slice(0, 8), *pair)]).tolist()) for pair in pairs]
    assert len(set(orders)) == len(pairs)
    again = [tuple(torch.cat([*data.BatchRows(97, 8, slice(0, 8), *pair)]).tolist()) for pair in pairs]
    assert again == orders
