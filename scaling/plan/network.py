"""How a plan's mesh axes lie on the chips' network, and the seconds of a collective over each of them.

TPU: the torus' axes are shared out among the mesh's (the book's M_X, M_Y, which sum to the torus'); pods are joined by
the datacenter's network. GPU: tensor innermost, then fsdp, data and pipe, on the tree of switches. A chip file with
measured collectives (`scaling.measure`) is taken at its word. All in seconds and bytes; V as in `scaling.trace`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scaling import cost
from scaling.hardware import Chip

AXES = ("pod", "pipe", "data", "fsdp", "tensor")  # outermost first


@dataclass(frozen=True)
class Network:
    """`sizes`: of each of AXES (1 if absent); `torus`: how many torus axes each spans; `rings`: whether they wrap."""

    chip: Chip
    sizes: Mapping[str, int]
    torus: Mapping[str, int] = field(default_factory=dict)
    rings: bool = True

    def seconds(self, op: str, nbytes: float, axis: str) -> float:
        """Seconds of a collective of V bytes over an axis, or of a hop along it if `op` is "CollectivePermute"."""
        size, twice = self.sizes.get(axis, 1), 2 if op == "AllReduce" else 1
        if size == 1:
            return 0.0
        if axis == "pod":
            return twice * nbytes / self.chip.need("dcn_bw")
        if self.chip.measured:
            return cost.seconds(op, nbytes, self.chip, size)
        hop = op == "CollectivePermute"
        if self.chip.kind == "gpu":
            inner = math.prod(self.sizes.get(a, 1) for a in AXES[AXES.index(axis) + 1 :])
            if hop:
                node = inner < self.chip.node_gpus
                share = self.chip.bandwidth("node" if node else "scale-out") / (1 if node else self.chip.node_gpus)
                return nbytes / share
            return twice * cost.gpu.all_gather(nbytes * inner, self.chip, size, inner)
        if hop:
            return cost.permute(nbytes, self.chip)
        m = self.torus[axis]
        hops = m * math.ceil(size ** (1 / m)) / (2 if self.rings else 1)
        bandwidth = self.chip.bandwidth("ici" if self.rings else "line", axes=m)
        return twice * max(hops * self.chip.hop_latency, nbytes / bandwidth)


def slice_shape(chip: Chip, chips: int) -> tuple[int, ...]:
    """The most cubic slice of so many chips that the pod has, multiples of 4 first (rings); ValueError if none."""
    pod = chip.need("pod")
    if chips == chip.pod_chips:
        return tuple(pod)
    best = None

    def walk(lengths: tuple[int, ...], left: int):
        nonlocal best
        if len(lengths) == len(pod) - 1:
            shape = tuple(sorted((*lengths, left)))
            if all(a <= b for a, b in zip(shape, sorted(pod), strict=True)):
                key = (not all(chip.wraps(shape)), max(shape) / min(shape))
                if best is None or key < best[0]:
                    best = key, shape
            return
        for length in range(1, max(pod) + 1):
            if left % length == 0:
                walk((*lengths, length), left // length)

    walk((), chips)
    if best is None:
        whole = "x".join(map(str, pod))
        raise ValueError(f"{chips} chips are no slice of a {whole} pod of {chip.name}: take a number that divides so")
    return best[1]
