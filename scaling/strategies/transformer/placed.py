"""Where a rank's tokens lie, in the batch and in the sequence: what rotates, hides and drops them follows from that."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.attention import fused
from scaling.models.dropout import dropout
from scaling.models.rope import restarted, tables
from scaling.strategies import context as ring
from scaling.strategies.axes import all_gather, present
from scaling.strategies.transformer.layer import Context, all_kept


class Placed:
    """Where this rank's tokens [B_PXE, T_C] lie in the batch, and in the sequence by the form of attention over C.
    `seed`: of dropout; None: nothing is dropped."""

    def __init__(self, config: Config, mesh, form: str, segments: Tensor | None, shape, dtype, seed: int | None):
        self.config, self.mesh, self.form, self.segments, self.dtype, self.seed = (
            config, mesh, form, segments, dtype, seed,
        )  # fmt: skip
        self.b, self.t = shape
        self.split = mesh.sizes.get("C", 1) > 1

    def placed(self, x: Tensor) -> Tensor:
        """x[B, T_C], in plain order, in the order that the form of attention wants."""
        if self.split and self.form == "zigzag":
            return ring.to_zigzag(x, 1, self.mesh, "C")
        return x

    def contexts(self, microbatches: int) -> list[Context]:
        """One `Context` for each microbatch: rope, and attention over this rank's tokens."""
        config = self.config
        if self.segments is None:
            positions, parts = self.positions(), [None] * microbatches
        else:
            whole = all_gather("s[B, T_C] -> s[B, T]", self.segments, self.mesh)
            c = self.mesh.coord.get("C", 0) if self.split else 0
            positions = self.placed(restarted(whole)[:, c * self.t : (c + 1) * self.t].contiguous())
            parts = self.placed(self.segments).chunk(microbatches)
        some = [positions] * microbatches if positions.dim() == 1 else positions.chunk(microbatches)
        ropes = (tables(p, config.rotary, config.theta, config.rope_scaling, self.dtype) for p in some)
        of_each = zip(ropes, map(self.attend, parts), self.drops(microbatches), strict=True)
        return [Context(config, self.mesh, *each) for each in of_each]

    def drops(self, microbatches: int) -> list[Callable]:
        """For each microbatch, what `Context.drop` is: the masks of its samples, and of its tokens x[.., T_CY, ..]."""
        if not self.config.dropout or self.seed is None:
            return [all_kept] * microbatches
        groups = self.mesh.size([axis for axis in "PXE" if axis in self.mesh.sizes])
        samples = torch.arange(self.b * groups, device=self.mesh.device)
        samples = tree.shard(samples, present("s[B_PXE]", self.mesh), self.mesh)
        positions = tree.shard(self.positions(), present("p[T_Y]", self.mesh), self.mesh)
        given = {"rate": self.config.dropout, "seed": self.seed, "positions": positions}
        return [partial(dropout, samples=some, **given) for some in samples.chunk(microbatches)]

    def positions(self) -> Tensor:
        if not self.split:
            return torch.arange(self.t, device=self.mesh.device)
        return ring.positions(self.form, self.t, self.mesh, "C")

    def attend(self, segments: Tensor | None):
        if not self.split:
            return lambda Q, K, V, window: fused(Q, K, V, window=window, segments=segments)
        return lambda Q, K, V, window: ring.attention(
            Q, K, V, self.mesh, axis="C", form=self.form, window=window, segments=segments
        )
