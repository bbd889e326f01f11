"""Batches of real text: the same rows in the same order on every mesh, each row once an epoch."""

from itertools import islice, product

import pytest
import torch
from refused import evaluated, refused
from torch.utils.data import DistributedSampler

from scaling import data
from scaling.mesh import AbstractMesh

K, BATCH = 3, 8
TEXT = (torch.arange(100) * 7 % 251).to(torch.uint8)  # bytes all differ, so a row's first byte names it


def epoch_of(mesh=None, epoch=0, seed=0, axes=("X",)):
    return list(data.batches(TEXT, K, BATCH, mesh, axes, seed, epoch))


def test_a_row_is_a_context_and_the_next_byte():
    windows, batches = TEXT.long().unfold(0, K + 1, 1), [torch.column_stack(batch) for batch in epoch_of()]
    assert {len(batch) for batch in batches} == {BATCH}
    for row in torch.cat(batches):
        torch.testing.assert_close(row, windows[TEXT.tolist().index(row[0])])


@pytest.mark.parametrize(("x", "y", "axes"), [(1, 1, "X"), (4, 2, "X"), (4, 2, "Y"), (2, 4, "XY"), (2, 2, "YX")])
def test_the_devices_parts_make_up_the_one_device_batch(x, y, axes):
    """Epoch after epoch; devices along other axes have the same."""
    whole, parts = [each for epoch in range(3) for each in epoch_of(epoch=epoch)], {}
    for i, j in product(range(x), range(y)):
        at = AbstractMesh({"X": x, "Y": y}, {"X": i, "Y": j})
        found = [*islice(data.endless(TEXT, K, BATCH, at, tuple(axes)), len(whole))]
        block = tuple(at.coord[axis] for axis in axes)  # the first axis is major
        torch.testing.assert_close(found, parts.setdefault(block, found), rtol=0, atol=0)
    for step, wanted in enumerate(whole):
        found = map(torch.cat, zip(*(parts[block][step] for block in sorted(parts)), strict=True))
        assert all(map(torch.equal, found, wanted))


def test_every_seed_and_epoch_has_an_order_of_its_own():
    """Each row at most once; also of pairs that a sum of multiples would confuse, and of numbers beyond 64 bits."""
    rows = (len(TEXT) - K) // BATCH * BATCH
    before, seen = torch.get_rng_state(), [TEXT[:rows].tolist()]
    for seed, epoch in [(0, 1_000_003), (1, 0), (0, 1), (12, 3), (1, 23), (2**63, 0), (2**64, 0), (-1, 0), (0, 0)]:
        found, again = (torch.cat([x[:, 0] for x, _ in epoch_of(epoch=epoch, seed=seed)]).tolist() for _ in range(2))
        assert len({*found}) == len(found) == rows
        assert found == again
        assert found not in seen
        seen.append(found)
    assert torch.equal(before, torch.get_rng_state())


def test_the_epochs_have_the_length_that_distributed_sampler_gives():
    theirs = DistributedSampler(TEXT[K:], num_replicas=4, rank=1, drop_last=True)
    assert len(epoch_of(AbstractMesh({"X": 4}, {"X": 1}))) == len(theirs) // (BATCH // 4)


def test_the_text_is_pythons_own_source_or_a_file_of_ones_own(tmp_path):
    text = data.load_text()
    assert text.dtype == torch.uint8
    assert 1_000_000 < len(text) <= data.MAX_BYTES
    assert bytes(text.numpy()).count(b"import ") > 1000
    for some, bits in ((text, pytest.approx(4.75, abs=0.75)), (torch.arange(64), pytest.approx(6)), (text[:1], 0)):
        assert data.order0_entropy(some) == bits
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert bytes(data.load_text(tmp_path / "a.txt", max_bytes=2).tolist()) == b"he"
    train, valid = data.split(data.load_text(tmp_path / "a.txt"), 0.4)
    assert (bytes(train.tolist()), bytes(valid.tolist())) == (b"hel", b"lo")
    assert [len(part) for part in data.split(TEXT)] == [90, 10]


REFUSED = """
call                              words of its error
data.load_text('missing.txt')     no text at 'missing.txt'
data.load_text(__file__, 0)       holds no text
data.split(TEXT, 1.0)             valid_fraction
data.split(TEXT, 0.0)             valid_fraction
data.batches(TEXT[:3], K, 1)      a text of 3 bytes has no context of k=3
data.batches(TEXT[:9], 0, 1)      a text of 9 bytes has no context of k=0
data.batches(TEXT, K, 98)         a batch of 98 rows cannot be drawn from 97
epoch_of(AbstractMesh({'X': 3}))  B of size 8 does not divide into 3 blocks
epoch_of(AbstractMesh({'Y': 2}))  unknown mesh axis X
"""
test_refused = refused(evaluated(REFUSED, globals()))
