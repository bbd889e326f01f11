"""What the strategies of Part 5 share: the stack of MLP blocks as each rank sees it, and what its backward needs.

A layer is Out = act(In W_in) W_out; with `norm`, In is RMS-normed first; with `residual`, In is added to Out (the
book's layer has neither). The functions here are local: they send nothing and know no mesh.
"""

from typing import NamedTuple

import torch

from scaling.collectives import Pending
from scaling.models.pointwise import act, act_vjp, rms_norm, rms_norm_vjp

__all__ = ["Layer", "Saved", "act", "act_vjp", "normed", "normed_vjp", "slot", "wait_all"]


class Layer(NamedTuple):
    """What the backward of one layer uses: its input (whole along D), and Tmp = In W_in before and after activation."""

    In: torch.Tensor
    Tmp: torch.Tensor
    Act: torch.Tensor


class Saved(NamedTuple):
    """What `forward` keeps for `backward`."""

    layers: list[Layer]
    activation: str
    residual: bool
    norm: bool
    keep: bool = True

    def depth(self, params: dict) -> int:
        """L. ValueError if these are not the layers of the params, as when they were given away before."""
        L, held = len(params["W_in"]), len(self.layers)
        if held != L:
            raise ValueError(
                f"saved has {held} layers, the params {L}: a backward with donate=True uses saved up; run forward again"
            )
        return L

    def take(self, l: int, donate: bool) -> Layer:
        """Layer l. With `donate` the last one, which is let go of: its memory is free once it has been used."""
        return self.layers.pop() if donate else self.layers[l]


def normed(In: torch.Tensor, norm: bool) -> torch.Tensor:
    return rms_norm(In) if norm else In


def normed_vjp(In: torch.Tensor, dHid: torch.Tensor, norm: bool) -> torch.Tensor:
    """The cotangent of In from that of normed(In): linear in dHid, so also right for partial sums of it."""
    return rms_norm_vjp(In, dHid) if norm else dHid


def slot(partial: dict | None, name: str, layer: int) -> dict:
    """einsum's arguments for a weight gradient that adds to those of earlier microbatches, if there are any."""
    return {} if partial is None else {"out": partial[name][layer], "add": True}


def wait_all(late: list[Pending], leave: int = 0) -> list[Pending]:
    """Wait for all but the newest few; return those still under way."""
    done = len(late) - leave
    for pending in late[: max(done, 0)]:
        pending.wait()
    return late[max(done, 0) :]
