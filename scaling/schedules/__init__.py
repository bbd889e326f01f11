"""Pipeline schedules as data (Part 5, "Pipelining"): which rank does what, in which order.

A schedule is a pure function of (stages, microbatches, chunks); the result is one list of small instructions a rank.
The same object is executed (`scaling.strategies.pipeline`), simulated (`scaling.schedules.simulator`) and drawn
(`scaling.show.timelines`). No torch.

`stages` ranks lie along the pipeline axis, and each holds `chunks` chunks of layers: the model is cut into
stages * chunks virtual stages, numbered in the order in which activations pass through them. Instructions name the
virtual stage they belong to. Transfers are instructions too: a Send stands right after the computation that made the
tensor and does not wait for the receiver, a Recv right before the one that needs it.

`families` has the schedules, `simulator` runs one on paper, `closed_forms` has their published bubbles.
"""

from scaling.schedules.families import SCHEDULES, dualpipe_v, gpipe, interleaved, make, naive, one_f_one_b, zb_h1
from scaling.schedules.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    Instruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from scaling.schedules.schedule import Schedule, split_backward

__all__ = ["SCHEDULES", "Backward", "BackwardInput", "BackwardWeight", "Forward", "ForwardBackward", "Instruction"]
__all__ += ["RecvActivation", "RecvGrad", "ReduceGrads", "Schedule", "SendActivation", "SendGrad", "dualpipe_v"]
__all__ += ["gpipe", "interleaved", "make", "naive", "one_f_one_b", "split_backward", "zb_h1"]
