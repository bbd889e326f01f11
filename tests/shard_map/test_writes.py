"""Writes in place inside shard_map: what keeps the written array's type is done, all else is refused."""

import pytest
import torch

from scaling.shard_map import pcast, psum, shard_map
from scaling.shard_map.types import marks
from scaling.spec import ShardingError

WHOLE = torch.arange(16.0).view(4, 4)
WRITES = {  # into r, reduced, s, partial sums, w, which varies as v does, or i, invariant: what is there afterwards
    "r.add_(r)": 6, "r.mul_(2)": 6, "r.copy_(r * 2)": 6, "torch.add(r, r, out=r)": 6, "i.add_(1)": 2,
    "s.add_(s)": 2 * WHOLE, "s.neg_()": -WHOLE, "s.copy_(s + s)": 2 * WHOLE, "s.mul_(r)": 3 * WHOLE,
    "s.__iadd__(s)": 2 * WHOLE, "s.mul_(2)": 2 * WHOLE, "s.copy_(s / r)": WHOLE / 3, "s.__setitem__(0, s[0])": WHOLE,
    "s.copy_(s @ pcast(torch.eye(4), 'X', to='reduced'))": WHOLE, "s.copy_(s.cumsum(1))": WHOLE.cumsum(1),
    "s.copy_(torch.addmm(s, s, pcast(torch.eye(4), 'X', to='reduced')))": 2 * WHOLE,
    "s.copy_(s.mean().expand(2, 4))": WHOLE.view(2, 8).mean(1).repeat_interleave(8).view(4, 4),
    "torch.add(s, s, out=s)": 2 * WHOLE,
    "w.add_(v)": 2 * WHOLE, "w.add_(r)": WHOLE + 3, "torch.add(v, v, out=w)": 2 * WHOLE,
    "torch.add(r, r, out=w)": 6,
}  # fmt: skip
CHANGES_THE_TYPE = (
    "r.add_(v)", "r.__iadd__(v)", "r[0].add_(v[0])", "r.copy_(v)", "r.lerp_(v, 0.5)", "r.masked_fill_(v > 3, 0.0)",
    "r.clamp_(max=v)", "r.__setitem__(0, v[0])", "r.mul_(v)", "r.sub_(v)", "torch.add(r, v, out=r)", "i.add_(v)",
    "torch.add(v, v, out=i)", "w.copy_(s)", "s.copy_(v)", "s.add_(1)", "s.add_(v)", "s.mul_(s)",
    "s.__setitem__(0, 1.0)", "r.add_(s)", "s.add_(r)",
)  # fmt: skip


def written(line: str) -> torch.Tensor:
    """Return what the array that a line writes to holds afterwards; of partial sums their sum over X."""

    def program(v):
        arrays = {"pcast": pcast, "v": v, "w": v.clone(), "i": torch.ones(2, 4), "torch": torch}
        arrays |= {"r": pcast(torch.full((2, 4), 3.0), "X", to="reduced"), "s": pcast(v, "X", to="unreduced").clone()}
        eval(line, arrays)
        found = arrays[name]
        if marks(found).unreduced:
            return psum(found, "X")
        return pcast(found, "X", to="varying") if marks(found) else found

    name = line.partition("out=")[2][:1] or line[0]
    out = "A[I, J]" if name in "si" else "A[I_X, J]"
    return shard_map(program, {"X": 2}, "A[I_X, J]", out, in_process=True)(WHOLE.clone())


@pytest.mark.parametrize("line", WRITES)
def test_what_is_written_in_place_keeps_its_type(line):
    wanted, found = WRITES[line], written(line)
    if found.shape == (2, 4) and torch.is_tensor(wanted):
        wanted = wanted[:2] + wanted[2:]
    torch.testing.assert_close(found, wanted + torch.zeros_like(found))


@pytest.mark.parametrize("line", CHANGES_THE_TYPE)
def test_a_write_that_would_change_a_type_is_refused(line):
    with pytest.raises(ShardingError, match=r"keeps its type|once for each device|product of sums|may only meet"):
        written(line)
