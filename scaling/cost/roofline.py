"""Rooflines of one chip (Part 1): the time of an operation from its FLOPs and its bytes, and its bottleneck.

Units are bytes, FLOPs, seconds, FLOPs/s and bytes/s. `C` is the rate of computing, `W` the rate of the memory or link.
"""

from dataclasses import dataclass

from scaling.common.arguments import not_negative, one_of, positive
from scaling.spec import dtype_bytes


@dataclass(frozen=True)
class Roofline:
    """An operation's cost: `flops` at `C` FLOPs/s and `nbytes` over `W` bytes/s."""

    flops: float
    nbytes: float
    C: float
    W: float

    def __post_init__(self):
        not_negative(flops=self.flops, nbytes=self.nbytes)
        positive(C=self.C, W=self.W)

    @property
    def math(self) -> float:
        """T_math in seconds."""
        return self.flops / self.C

    @property
    def comms(self) -> float:
        """T_comms in seconds."""
        return self.nbytes / self.W

    @property
    def lower(self) -> float:
        """Seconds when computing and moving overlap fully: the maximum."""
        return max(self.math, self.comms)

    @property
    def upper(self) -> float:
        """Seconds without overlap: the sum, at most twice the maximum."""
        return self.math + self.comms

    @property
    def intensity(self) -> float:
        """FLOPs per byte of the operation."""
        return self.flops / self.nbytes if self.nbytes else float("inf")

    @property
    def critical(self) -> float:
        """FLOPs per byte of the hardware, above which an operation is compute-bound."""
        return self.C / self.W

    @property
    def bound(self) -> str:
        """The bottleneck: "compute" or "comms"."""
        return "compute" if self.math >= self.comms else "comms"

    @property
    def attained(self) -> float:
        """FLOPs/s with full overlap: min(C, intensity * W)."""
        return self.flops / self.lower if self.lower else 0.0


def roofline(flops: float, nbytes: float, C: float, W: float) -> Roofline:
    """Return the roofline of an operation on a chip of C FLOPs/s and W bytes/s (Part 1, "Where Does the Time Go?")."""
    return Roofline(flops, nbytes, C, W)


def attainable(intensity: float, C: float, W: float) -> float:
    """Return the FLOPs/s of an algorithm of this intensity: min(C, intensity * W) (Part 1, "Visualizing rooflines")."""
    positive(intensity=intensity, C=C, W=W)
    return min(C, intensity * W)


def operand_bytes(dtypes) -> tuple[float, float, float]:
    """Return the bytes per element of activations, weights and output: one dtype for all three, or one for each."""
    three = tuple(dtypes) if isinstance(dtypes, (tuple, list)) else (dtypes,) * 3
    if len(three) != 3:
        raise ValueError(
            f"dtypes = {dtypes!r}: one dtype, or three (activations, weights, output)"
            "\n  fix: give a string, or a tuple of three"
        )
    a, w, o = (dtype_bytes(dtype) for dtype in three)
    return a, w, o


def matmul(B: float, D: float, F: float, C: float, W: float, dtypes="bf16") -> Roofline:
    """X[B, D] *_D Y[D, F] -> Z[B, F], each operand read or written once (Part 1, "Matrix multiplication").

    `dtypes`: one for all, or (activations, weights, output). FLOPs are 2BDF.
    """
    positive(B=B, D=D, F=F)
    a, w, o = operand_bytes(dtypes)
    return Roofline(2 * B * D * F, a * B * D + w * D * F + o * B * F, C, W)


def critical_batch(C: float, W: float, D: float | None = None, F: float | None = None, dtypes="bf16") -> float:
    """Return the tokens (per replica of the weights) from which a matmul is compute-bound; inf if it never is.

    Without D and F this is the limit of large ones, w C / (2 W). With them it is exact, wDF / (2DF W/C - aD - oF), from
    2BDF / C = (aBD + wDF + oBF) / W.
    """
    positive(C=C, W=W)
    a, w, o = operand_bytes(dtypes)
    if D is None and F is None:
        return w * C / (2 * W)
    positive(D=D, F=F)
    depth, width = float(D or 0), float(F or 0)
    slope = 2 * depth * width * W / C - a * depth - o * width
    return w * depth * width / slope if slope > 0 else float("inf")


def tiled_matmul(m: int, k: int, n: int, tiles: tuple[int, int, int], C: float, W: float) -> Roofline:
    """Return the roofline of (m, k) x (k, n) in bf16 by tiles (bm, bk, bn) (Part 1, footnote).

    Each output tile reads its row and column of tiles, so the intensity tends to bm bn / (bm + bn). Tiles must
    divide the matrices; FLOPs are 2mkn.
    """
    bm, bk, bn = tiles
    positive(m=m, k=k, n=n, bm=bm, bk=bk, bn=bn)
    if m % bm or k % bk or n % bn:
        raise ValueError(f"tiles {tiles} do not divide {(m, k, n)}\n  fix: pad the matrix, or take other tiles")
    tm, tk, tn = m // bm, k // bk, n // bn
    return Roofline(2 * m * k * n, 2 * tm * tn * (tk * (bm * bk + bk * bn) + bm * bn), C, W)


def split_contraction(B: float, D: float, F: float, C: float, W: float) -> Roofline:
    """X[B, D_X] *_D Y[D_X, F] on two chips which then swap partial sums (Part 1, "Network communication rooflines").

    T_math = 2BDF / (2C) and T_comms = 2BF / W each way, with W one-way, so it is compute-bound iff D > 2C/W for any B.
    """
    positive(B=B, D=D, F=F)
    return Roofline(2 * B * D * F / 2, 2 * B * F, C, W)


def mfu(flops: float, seconds: float, chips: float, C: float) -> float:
    """Return the model FLOPs utilisation: the useful FLOPs over the most that the chips could do in that time."""
    not_negative(flops=flops)
    positive(seconds=seconds, chips=chips, C=C)
    return flops / (seconds * chips * C)


def seconds_at(flops: float, chips: float, C: float, mfu: float = 1.0) -> float:
    """Return the seconds that `flops` take on `chips` chips at a utilisation."""
    not_negative(flops=flops)
    positive(chips=chips, C=C, mfu=mfu)
    one_of("mfu <= 1", mfu <= 1, (True,))
    return flops / (chips * C * mfu)
