"""What lies between a layer's matmuls: the functions that each rank applies to its own rows.

A layer is Out = act(norm(In) W_in) W_out. The book's layer has neither activation nor norm: `Block("none")`.
"""

from typing import NamedTuple

from torch import Tensor

from scaling.models.pointwise import act, act_vjp, check_activation, rms_norm, rms_norm_vjp


class Block(NamedTuple):
    """`activation`: none, relu or gelu; `normed`: In is RMS-normed first, which takes whole rows of D.

    `keep`: whether a gathered In[B, D] is kept for the backward, or gathered there again (a step of the book).
    """

    activation: str = "none"
    normed: bool = False
    keep: bool = True

    def validated(self) -> "Block":
        """This block. ValueError for an unknown activation."""
        check_activation(self.activation)
        return self

    def norm(self, In: Tensor) -> Tensor:
        return rms_norm(In) if self.normed else In

    def norm_vjp(self, In: Tensor, dHid: Tensor) -> Tensor:
        """The cotangent of In from that of norm(In): linear in dHid, so also right for partial sums of it."""
        return rms_norm_vjp(In, dHid) if self.normed else dHid

    def act(self, Tmp: Tensor) -> Tensor:
        return act(Tmp, self.activation)

    def act_vjp(self, Tmp: Tensor, dAct: Tensor) -> Tensor:
        """The cotangent of Tmp from that of act(Tmp)."""
        return act_vjp(Tmp, dAct, self.activation)
