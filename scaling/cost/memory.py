"""Bytes that each chip holds while training: params, gradients, optimizer state, activations (Parts 4, 5 and 6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from scaling.common.arguments import not_negative, one_of, positive, whole
from scaling.spec import dtype_bytes

ROOM = 0.9  # share of a device's memory to plan with; the rest is for the runtime, buffers and fragmentation


@dataclass(frozen=True)
class Memory:
    """Bytes per chip."""

    params: float
    grads: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.params + self.grads + self.optimizer + self.activations


def checkpoint_bytes(tokens: float, widths: Sequence[float], L: int, dtype="bf16") -> float:
    """Return the bytes of checkpoints [tokens, width] kept in L layers: 2 L tokens sum(widths) in bf16 (Part 5, Q2)."""
    positive(tokens=tokens)
    whole(L=L)
    not_negative(**{f"widths[{i}]": width for i, width in enumerate(widths)})
    return dtype_bytes(dtype) * L * tokens * sum(widths)


def training_memory(
    params: float, activations: float = 0, X: int = 1, Y: int = 1, Z: int = 1, zero: int = 0,
    param_bytes: float = 2, grad_bytes: float = 2, optimizer_bytes: float = 8,
) -> Memory:  # fmt: skip
    """Return the bytes per chip of a model of `params` parameters, with `activations` bytes in all.

    TP divides everything by Y, and pipelining by Z. Data parallelism divides the activations by X; ZeRO divides by X
    also the optimizer state (stage 1), the gradients (2) and the params (3, FSDP). A parameter takes 2 bytes in bf16,
    its gradient 2, and Adam's two fp32 moments 8, or 12 with an fp32 copy of the params. The book's 10 bytes per
    parameter leave the gradients out: `grad_bytes=0`.
    """
    positive(params=params)
    whole(X=X, Y=Y, Z=Z)
    one_of("zero", zero, (0, 1, 2, 3))
    not_negative(
        activations=activations, param_bytes=param_bytes, grad_bytes=grad_bytes, optimizer_bytes=optimizer_bytes
    )
    share = params / (Y * Z)
    return Memory(
        params=param_bytes * share / (X if zero >= 3 else 1),
        grads=grad_bytes * share / (X if zero >= 2 else 1),
        optimizer=optimizer_bytes * share / (X if zero >= 1 else 1),
        activations=activations / (X * Y * Z),
    )


def largest_model(hbm_bytes: float) -> float:
    """Return the parameters that fit one chip: HBM / 10 with Adam (Part 5, "Data Parallelism": 9.6e9 on a v5p)."""
    positive(hbm_bytes=hbm_bytes)
    return hbm_bytes / 10
