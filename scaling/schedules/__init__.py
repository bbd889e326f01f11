"""Pipeline schedules as data: the instructions of each rank, in their order (Part 5, "Pipelining").

A schedule is made by a pure function of (stages, microbatches, chunks), and consists of one list of small instructions
per rank. The same object is executed (`scaling.strategies.pipeline`), simulated (`scaling.schedules.simulator`) and
drawn (`scaling.show.timelines`). This room does not need torch.

The pipeline axis has `stages` ranks, and each of them holds `chunks` chunks of layers. So the model is cut into
stages * chunks virtual stages, which are numbered in the order in which activations pass through them. Instructions
name the virtual stage that they belong to. Transfers are instructions too: a Send comes right after the computation
that makes the tensor, and does not wait for the receiver; a Recv comes right before the computation that needs it.

`families` has the schedules, `simulator` runs one on paper, and `closed_forms` has their published bubbles.
"""

from scaling.schedules.families import SCHEDULES, dualpipe_v, gpipe, interleaved, make, naive, one_f_one_b, zb_h1
from scaling.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    Instruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    Schedule,
    SendActivation,
    SendGrad,
    split_backward,
)

__all__ = ["SCHEDULES", "Backward", "BackwardInput", "BackwardWeight", "Forward", "ForwardBackward", "Instruction"]
__all__ += ["RecvActivation", "RecvGrad", "ReduceGrads", "Schedule", "SendActivation", "SendGrad", "dualpipe_v"]
__all__ += ["gpipe", "interleaved", "make", "naive", "one_f_one_b", "split_backward", "zb_h1"]
