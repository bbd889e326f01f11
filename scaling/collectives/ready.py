"""A typed line on operands of one shape, dtype and device, on one mesh: made at its first call, run at every one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from scaling import trace
from scaling.collectives.checked import call_of, compared, meet
from scaling.collectives.kinds import event, output_shape, starter
from scaling.collectives.lines import LineStep
from scaling.collectives.pending import Pending
from scaling.mesh.meeting import meeting


class Ready:
    """One step of a line. What is decided: that the operand fits, how the op starts, and what the ranks compare."""

    __slots__ = ("call", "compares", "group", "meeting", "op", "start", "step")

    def __init__(self, step: LineStep, shape: torch.Size, dtype: torch.dtype):
        self.step, self.op, self.group = step, step.op, step.group
        self.start = starter(step.op, step.group, dtype)
        self.compares, self.call = compared(step.op), call_of(step.op, shape, dtype, "")
        self.meeting = meeting(step.op.checked)

    def run(self, x: Tensor, async_op: bool = False, out: Tensor | None = None) -> Any:
        """The result, or with `async_op` a Pending; in the buffer `out`, if one is given."""
        seen = trace.reached(event(self.op, x, async_op)) if trace.active() else None
        if self.compares:
            self.meeting.meet(self.call) if self.meeting is not None else meet(self.op, self.call)
        if seen is not None:
            trace.record(seen)
        works, make = self.start(x, self.op, self.group, out)
        if async_op:
            return Pending(works, lambda: self._finished(make(), out), seen, self.step)
        if seen is not None:
            seen.left = seen.waited = trace.now()
        for work in works:
            work.wait()
        result = make()
        if out is not None or self.op.mean:
            result = self._finished(result, out)
        if seen is not None:
            trace.done(seen)
        return result

    def _finished(self, result: Tensor, out: Tensor | None) -> Tensor:
        """The result divided by the size, of a mean; and in the buffer given for it, if it was not made there."""
        if self.op.mean and self.op.size > 1:
            result.div_(self.op.size)
        return result if out is None or result is out else out.copy_(result)


def made_ready(steps: Sequence[LineStep], x: Tensor, mesh) -> list[Ready]:
    """The steps of a line for operands as x. ShardingError if x is not what the line says."""
    steps[0].check(x, mesh)
    shape, made = x.shape, [Ready(steps[0], x.shape, x.dtype)]
    for before, step in pairwise(steps):
        shape = torch.Size(output_shape(before.op, shape))
        if not step.fits(shape):
            step.refuse_shape(tuple(shape))
        made.append(Ready(step, shape, x.dtype))
    return made
