"""Watch a run for replicas that differ, numbers that are not finite, losses that jump, and slow ranks.

The guards are cheap and on by default. They look at values gathered from all ranks, so all ranks reach the same
verdict. A message names the leaf, axis, ranks and step.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather
from scaling.spec import Spec, format_axes, parse
from scaling.trace import Log
from scaling.train.blocks import first_replica

ROW, ROWS = 1 << 13, 1 << 7  # 8-byte words in a row of the hash, and the rows that are hashed at a time
AGAIN = "go on from the last checkpoint (--resume); if it comes back, look for what differs by rank"
SHARE, LEAST = 0.12, 0.025  # a rank is slow if it lags by more than this share of a step and by more than these seconds
# A loss jumps if it rises by more than DEVIATIONS of the usual changes, and by more than PART of the median.
DEVIATIONS, PART = 10.0, 0.25
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes of an element -> the dtype of its bits; 8: int64


def check_replicas(state, specs, mesh, step: int, name: str = "state") -> None:
    """Check that all elements are finite, and that ranks which hold the same block hold the same bits.

    Raises:
        ArithmeticError: An element is not finite, or replicas differ; the message names the leaf and the ranks, and the
            axes along which replicas differ.
    """
    typed = tree.paired(state, specs, name)
    for (where, _, spec), bad in zip(typed, ranks_not_finite(typed, mesh), strict=True):
        if bad:
            raise ArithmeticError(f"step {step}: {where}, {spec}, is not finite on ranks {bad}\n  fix: {AGAIN}")
    check_same(typed, mesh, step)


def check_same(typed: Sequence[tuple[str, Tensor, Spec]], mesh, step: int) -> None:
    """Check that replicas hold the same bits, given (name, leaf, type) triples; elements may be infinite or NaN.

    Raises:
        ArithmeticError: Replicas differ; the message names the leaf, axes and ranks.
    """
    hashes = gather_over_ranks(_on(mesh, [digest(leaf) for _, leaf, _ in typed]), mesh)
    for i, (where, _, spec) in enumerate(typed):
        if mismatch := replica_mismatch(hashes[:, i].tolist(), spec, mesh):
            ranks, axes = mismatch
            who = f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}"
            raise ArithmeticError(
                f"step {step}: {where}, {spec}, is replicated over {format_axes(axes)}, but {who} of {mesh.size()} "
                f"{'have' if len(ranks) > 1 else 'has'} other values than the others\n"
                f"  fix: {AGAIN}: seeds, data, random numbers drawn on each rank, or faulty memory"
            )


def check_finite(loss: Tensor, norm: Tensor, squares: Sequence[Tensor], specs, mesh, step: int) -> None:
    """Check that the loss and the norm of the gradients are finite.

    `squares`: what `optim.clipping.norm_and_squares` returns for these gradients, whose types are `specs`.

    Raises:
        ArithmeticError: One is not finite; the message names the gradients and ranks.
    """
    if math.isfinite(loss.item()) and math.isfinite(norm.item()):
        return
    bad = zip(tree.named_leaves(specs, "grads"), ranks_of(torch.stack([*squares]).isfinite(), mesh), strict=True)
    found = [f"{where} on ranks {ranks}" for where, ranks in bad if ranks]
    more = f" and {len(found) - 3} more leaves" if len(found) > 3 else ""
    raise ArithmeticError(
        f"step {step}: the loss is {loss.item()}, the gradients' norm {norm.item()}; not finite: "
        f"{'; '.join(found[:3]) or 'the loss alone'}{more}\n"
        "  fix: try a lower --lr, a longer --warmup, or --dtype fp32; "
        "no checkpoint has been updated with these gradients"
    )


def check_scaled(state: Mapping, loss: Tensor, norm: Tensor, squares: Sequence[Tensor], specs, mesh, step: int) -> dict:
    """Return the optimizer's option {"finite": whether the norm is finite}, or {} if its state has no loss scale.

    Raises:
        ArithmeticError: Halving the scale cannot help: the loss is not finite, or the gradients are not and there is no
            scale or it is already 1.
    """
    if float(state.get("scale", 1.0)) <= 1 or not math.isfinite(loss.item()):
        check_finite(loss, norm, squares, specs, mesh, step)
    return {"finite": math.isfinite(norm.item())} if "scale" in state else {}


def leaf_norms(squares: Sequence[Tensor], specs, mesh) -> Tensor:
    """Return float64[leaves], the norm of each whole gradient in the order of `tree.named_leaves`, on every rank.

    `squares`: as in `check_finite`.
    """
    counted = [first_replica(parse(spec), mesh.coord, mesh) for spec in tree.leaves(specs)]
    once = torch.stack([*squares]) * torch.tensor(counted, device=mesh.device)
    return gather_over_ranks(once, mesh).sum(0).sqrt()


@dataclass
class Losses:
    """The latest losses, from which a jump is detected.

    A loss jumps if it rises above the median of the 8 latest losses by more than 10 times the usual change from step to
    step, and by more than 25% of that median. Earlier losses may be much higher, so they are left out of the median.
    """

    seen: deque = field(default_factory=lambda: deque(maxlen=64))

    def jump(self, loss: float, step: int) -> str:
        """Record a loss; return a warning if it jumped, or "" if it did not."""
        before = [*self.seen]
        self.seen.append(loss)
        if len(before) < 16:
            return ""
        level = statistics.median(before[-8:])
        usual = 1.4826 * statistics.median(abs(b - a) for a, b in pairwise(before))  # a normal distribution's deviation
        if loss - level <= max(DEVIATIONS * usual, PART * abs(level)):
            return ""
        return f"step {step}: the loss jumped to {loss:.4f}; the median of the 8 before is {level:.4f}"


def gather_over_ranks(x: Tensor, mesh) -> Tensor:
    """x[N] of each rank -> [world, N] on every rank, on the CPU."""
    return gather_on_device(x, mesh).cpu()


def gather_on_device(x: Tensor, mesh) -> Tensor:
    """x[N] of each rank -> [world, N] on the mesh's device, for which the host does not wait."""
    axes, x = [axis for axis, size in mesh.sizes.items() if size > 1], x[None].to(mesh.device, non_blocking=True)
    split = Spec("h", (("R", tuple(axes)), ("N", ())))
    return all_gather(f"{split} -> h[R, N]", x, mesh) if axes else x


def _on(mesh, scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars into [N] on the mesh's device; a run's batch and its count of steps are on the CPU."""
    return torch.stack([x.to(mesh.device) for x in scalars])


def digest(x: Tensor) -> Tensor:
    """Return int64[], a hash of the bits of x and of their positions.

    Sums wrap around, so the order of adding does not matter. Each word of 8 bytes is multiplied by an odd number that
    depends on its position, so one changed bit always changes the sum.
    """
    flat = x.detach().contiguous().view(-1)
    cut = flat.nbytes // (8 * ROW) * (8 * ROW) // flat.element_size()
    rest = flat[cut:].view(BITS.get(flat.element_size(), torch.int64)).to(torch.int64)
    total = (rest * odd_weights(len(rest), 2, x.device)).sum()
    words = (flat if flat.data_ptr() % 8 == 0 else flat.clone())[:cut].view(torch.int64).view(-1, ROW)
    across, down = odd_weights(ROW, 2, x.device), odd_weights(len(words), 2 * ROW, x.device)
    for first in range(0, len(words), ROWS):
        sums = (words[first : first + ROWS] * across).sum(1)
        total += (sums * down[first : first + ROWS]).sum()
    return total


def odd_weights(n: int, step: int, device) -> Tensor:
    """Return int64[n]: 1, 1 + step, 1 + 2 step, ..."""
    return torch.arange(n, device=device) * step + 1


def ranks_not_finite(typed, mesh) -> list[list[int]]:
    """Return the ranks on which an element is not finite, for each leaf of `tree.paired`."""
    return ranks_of(_on(mesh, [all_finite(leaf) for _, leaf, _ in typed]), mesh)


def ranks_of(good: Tensor, mesh) -> list[list[int]]:
    """Return for each of good[leaves] the ranks on which it is False."""
    return [(leaf == 0).nonzero().flatten().tolist() for leaf in gather_over_ranks(good.long(), mesh).unbind(1)]


def all_finite(x: Tensor) -> Tensor:
    """Return bool[], whether every element is finite.

    A finite sum proves it, and costs a tenth of checking each element. A sum that is not finite may have overflowed, so
    then all elements are checked.
    """
    if x.is_floating_point() and not x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite():
        return x.isfinite().all()
    return torch.ones((), dtype=torch.bool, device=x.device)


def replica_mismatch(hashes: list[int], spec: "Spec | str", mesh) -> tuple[list[int], list[str]] | None:
    """Return (the ranks that differ from most holders of their block, the axes along which they differ), or None."""
    spec, blocks = parse(spec), {}
    at = [mesh.coord_of(rank) for rank in range(mesh.size())]
    for rank, place in enumerate(at):
        blocks.setdefault(tuple(place[axis] for axis in spec.axes), []).append(rank)
    differing: list[int] = []
    axes: set[str] = set()
    for ranks in blocks.values():
        found = [hashes[rank] for rank in ranks]
        usual = max(found, key=lambda h: (found.count(h), -found.index(h)))
        wrong = [rank for rank in ranks if hashes[rank] != usual]
        for a in wrong:
            axes |= differing_axes([at[b] for b in ranks if hashes[b] == usual], at[a])
        differing += wrong
    return (sorted(differing), [axis for axis in mesh.sizes if axis in axes]) if differing else None


def differing_axes(others: list[Mapping[str, int]], at: Mapping[str, int]) -> set[str]:
    """Return the axes along which `at` differs from the nearest of `others`, the one with the fewest of them."""
    differing = [{axis for axis in at if other[axis] != at[axis]} for other in others]
    return min(differing, key=len)


def wait_seconds(log: Log) -> float:
    """Return the seconds that this rank waited in the collectives of a trace, for other ranks and for their data."""
    return sum(e.end - (e.waited if e.async_op else e.called) for e in log.collectives() if e.op != "Send")


@dataclass
class Pace:
    """The latest steps of this rank, as (seconds of the step, seconds of it spent waiting in collectives).

    All ranks take equally long for a step, because they wait for each other. The slow rank is the one that waits least.
    """

    steps: deque = field(default_factory=lambda: deque(maxlen=64))

    def add(self, seconds: float, waited: float) -> None:
        """Record a step and the seconds of it that this rank waited."""
        self.steps.append((seconds, min(waited, seconds)))

    def slow(self, mesh, step: int) -> str:
        """Return a warning that names the slow ranks, or "" if no rank is slow; then forget the recorded steps.

        All ranks call it. Each rank gives its quickest step, because other work on the machine can only add time.
        """
        quickest = [min(seconds - waited for seconds, waited in self.steps), min(seconds for seconds, _ in self.steps)]
        self.steps.clear()
        pace = gather_over_ranks(torch.tensor(quickest, dtype=torch.float64), mesh).tolist()
        return "; ".join(found) if (found := slow_ranks([work for work, _ in pace], pace[0][1], mesh, step)) else ""


def slow_ranks(work: list[float], step_seconds: float, mesh, step: int) -> list[str]:
    """Return a warning for each rank that works much longer than the median of its peers, the ranks of its stage.

    Args:
        work: The seconds per step that each rank works, without waiting.
        step_seconds: The seconds of a whole step.
        mesh: The mesh.
        step: The number of the step.
    """
    at, found = [mesh.coord_of(rank) for rank in range(len(work))], []
    for rank, mine in enumerate(work):
        others = [w for r, w in enumerate(work) if r != rank and at[r].get("Z") == at[rank].get("Z")]
        usual = statistics.median(others) if others else mine
        if mine - usual > max(SHARE * step_seconds, LEAST):
            where = ", ".join(f"{axis}={i}" for axis, i in at[rank].items())
            found.append(f"step {step}: rank {rank} ({where}) is slow: it works {mine * 1e3:.0f} ms a step, its peers "
                         f"{usual * 1e3:.0f} ms, and they wait for it")  # fmt: skip
    return found
