"""One chip as data: its rates, its memories and its links.

SI units throughout: FLOPs/s, bytes, bytes/s, seconds; a price in dollars per chip and hour. `None` is what nobody says.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from scaling.common.arguments import check_fields

KINDS = ("tpu", "gpu", "cpu")
COUNTS = ("pod", "host", "degree", "links", "switches", "ports", "ranks", "cores", "mxus", "mxu", "vector_alus", "sms")
LEAST = {"flops": 1e6, "_bytes": 1e3, "_bw": 1e5, "bandwidth": 1e3, "clock": 1e6, "clock_base": 1e6}  # of any chip
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "float32": "fp32", "f32": "fp32", "uint8": "int8"}
ALIASES |= {"float64": "fp64", "f64": "fp64", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Level:
    """One level of a tree of switches: a unit has `degree` children, each on `links` links of `link_bw` bytes/s.

    `switches` in a unit, with `ports` ports each of `link_bw`, if known. `switched` false: there are no switches, each
    pair of children has links of its own (MI300X), so a group of d children uses (d - 1)/(degree - 1) of them.
    """

    name: str
    degree: int
    link_bw: float
    links: int = 1
    switches: int | None = None
    ports: int | None = None
    switched: bool = True

    @property
    def child_bw(self) -> float:
        """Bytes/s of one child, each way: into the unit's switches, or over all its links to the other children."""
        return self.links * self.link_bw

    def group_bw(self, children: int) -> float:
        """Bytes/s of one child within a group of so many."""
        return self.child_bw * (1 if self.switched or children < 2 else (children - 1) / (self.degree - 1))


@dataclass(frozen=True)
class Measured:
    """A collective as measured over `ranks`: seconds = latency + V / bandwidth, V as in `scaling.cost.collectives`.
    `alone`: while all other ranks of the machine stood still, not while their groups did the same."""

    op: str
    ranks: int
    latency: float
    bandwidth: float
    alone: bool = False


@dataclass(frozen=True)
class Efficiency:
    """What share of its peaks a chip reaches in a training step: of a forecast, never of a bound.

    `matmul` by dtype ("bf16"; others as bf16), `attention` of the bf16 peak in an attention kernel, `memory` of hbm_bw
    in what is not a matmul, `links` of the links' bytes/s, `hidden` the share of the collectives on the critical path
    (of tensor, context and expert axes) that runs behind matmuls; `cores` the share of the chip's cores that a
    collective takes from the matmuls while it runs behind them. `launch`: seconds that a collective takes at least.
    """

    matmul: tuple[tuple[str, float], ...] = (("bf16", 1.0),)
    attention: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    hidden: float = 0.0
    cores: float = 0.0
    launch: float = 0.0

    def __post_init__(self):
        shares = {"attention": self.attention, "memory": self.memory, "links": self.links}
        shares |= {f"matmul.{dtype}": share for dtype, share in self.matmul}
        for name, share in shares.items():
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise ValueError(
                    f"efficiency.{name} is {share!r}\n  fix: give a share of the peak, above 0 and at most 1"
                )
        for name in ("hidden", "cores"):
            if not isinstance(share := getattr(self, name), (int, float)) or not 0 <= share <= 1:
                raise ValueError(f"efficiency.{name} is {share!r}\n  fix: give a share, from 0 to 1")
        if not isinstance(self.launch, (int, float)) or not 0 <= self.launch < 1:
            raise ValueError(f"efficiency.launch is {self.launch!r}\n  fix: give seconds, below 1")

    def of_matmul(self, dtype: str) -> float:
        """The share of the peak in `dtype` that matmuls reach."""
        shares = dict(self.matmul)
        return shares.get(dtype, shares.get("bf16", 1.0))


@dataclass(frozen=True)
class Chip:
    """One accelerator with its memories and links. All bandwidths are bytes/s and one-way unless the name says more."""

    name: str
    kind: str
    source: str = ""
    peaks: tuple[tuple[str, float], ...] = ()  # (dtype, FLOPs/s)
    hbm_bytes: float | None = None
    hbm_bw: float | None = None
    sram_bytes: float | None = None  # a TPU's VMEM
    sram_bw: float | None = None
    # a TPU's network: a torus of links, hosts with PCIe, and the datacenter's network (per chip)
    axes: int = 0
    pod: tuple[int, ...] | None = None
    host: tuple[int, ...] | None = None
    link_bw: float | None = None
    wrap: str | None = (
        None  # which axes of a slice are rings: "full" (as long as the pod's), "cubes" (4x4x4), "all", "none"
    )
    hop_latency: float = 1e-6
    pcie_bw: float | None = None
    dcn_bw: float | None = None
    # inside a TPU
    cores: int | None = None
    mxus: int | None = None  # per core
    mxu: int | None = None  # side of the systolic array
    vector_alus: int | None = None  # per core
    clock: float | None = None  # Hz; a GPU's boost
    # a GPU's network, from the node upwards, and its insides
    levels: tuple[Level, ...] = ()
    clock_base: float | None = None
    sms: int | None = None
    smem_bytes: float | None = None  # per SM
    l2_bytes: float | None = None
    l2_bw: float | None = None
    registers_bytes: float | None = None
    price: float | None = None
    measured: tuple[Measured, ...] = ()
    efficiency: Efficiency = Efficiency()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"chip {self.name}: kind is {self.kind!r}\n  fix: give one of {KINDS}")
        if self.wrap not in (None, "full", "cubes", "all", "none"):
            raise ValueError(
                f"chip {self.name}: wrap is {self.wrap!r}\n  fix: give one of 'full', 'cubes', 'all', 'none'"
            )
        if isinstance(self.axes, bool) or not isinstance(self.axes, int) or self.axes < 0:
            raise ValueError(f"chip {self.name}: axes is {self.axes!r}\n  fix: give the number of axes of its torus")
        for name, value in _numbers(self):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"chip {self.name}: {name} is {value!r}\n  fix: give a positive number, in SI units")
            if name.rpartition(".")[2] in COUNTS and not isinstance(value, int):
                raise ValueError(f"chip {self.name}: {name} is {value!r}\n  fix: give a whole number")
            least = next((low for suffix, low in LEAST.items() if name.rpartition(".")[2].endswith(suffix)), 0)
            if value < (LEAST["flops"] if name.startswith("flops.") else least):
                raise ValueError(
                    f"chip {self.name}: {name} is {value!r}: too little in SI units: 80 GB is 80e9"
                    "\n  fix: write bytes, bytes/s and FLOPs/s without prefixes"
                )
        for record in (self, *self.levels, *self.measured):
            check_fields(record, f"chip {self.name}: ")
        if self.pod and len(self.pod) != self.axes:
            raise ValueError(
                f"chip {self.name}: pod {self.pod} has {len(self.pod)} axes, but axes = {self.axes}"
                "\n  fix: give the pod a length for each axis"
            )

    def flops(self, dtype: str = "bf16") -> float:
        """Peak matmul FLOPs/s in `dtype`; ValueError if the chip has no such units (or the book no such number)."""
        dtype = ALIASES.get(str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
        if dtype not in dict(self.peaks):
            has = ", ".join(name for name, _ in self.peaks) or "no dtype at all"
            raise ValueError(f"{self.name} has no FLOPs/s for {dtype}: its table has {has}\n  fix: choose one of them")
        return dict(self.peaks)[dtype]

    def need(self, field: str):
        """The value of a field, or a ValueError that says the chip lacks it."""
        value = getattr(self, field)
        if value in (None, (), 0):
            raise ValueError(
                f"{self.name} ({self.kind}) has no {field}\n  fix: give a chip that has, or a chip file of your own"
            )
        return value

    @property
    def ici_bw(self) -> float:
        """Bytes/s that a chip sends along one axis that is a ring, over both of its links (the book's W_ici)."""
        return 2 * self.need("link_bw")

    @property
    def pod_chips(self) -> int:
        return math.prod(self.need("pod"))

    @property
    def host_chips(self) -> int:
        return math.prod(self.need("host"))

    @property
    def node_gpus(self) -> int:
        return self.need("levels")[0].degree

    def levels_for(self, gpus: int) -> tuple[Level, ...]:
        """The levels of a cluster of so many GPUs: the highest one takes as many children as it needs.

        Each child keeps its links: a full fat tree, to which switches are added (Part 12, Quiz 3, Question 2).
        ValueError if the chip's file knows nothing beyond the node, and the node is too small.
        """
        levels = self.need("levels")
        below = math.prod(level.degree for level in levels[:-1])
        if gpus <= below * levels[-1].degree:
            return levels
        if len(levels) == 1:
            raise ValueError(
                f"{gpus:,} GPUs: nothing is known of {self.name}'s network beyond the node of {self.node_gpus}; "
                "fix: give a chip file with a second level"
            )
        return (*levels[:-1], replace(levels[-1], degree=-(-gpus // below), switches=None))

    def bandwidth(self, link: str, axes: int = 1) -> float:
        """Bytes/s of one chip's share of a link, as the closed forms of Parts 5 and 12 use it.

        "ici": both directions of `axes` rings; "line": `axes` axes without wraparound; "hbm", "sram", "pcie", "dcn";
        "node": a GPU into its node; "scale-out": a *node* into the network, to which Part 12 holds C of one GPU.
        """
        if link in ("ici", "line"):
            _check_axes(self, axes)
            return axes * (self.ici_bw if link == "ici" else self.need("link_bw"))
        if link in ("hbm", "sram", "pcie", "dcn"):
            return self.need(f"{link}_bw")
        if link in ("node", "scale-out"):
            depth = ("node", "scale-out").index(link)
            if len(self.need("levels")) <= depth:
                raise ValueError(
                    f"{self.name}: nothing is known of its network beyond the node"
                    "\n  fix: choose a chip with a network, or add it to a chip file of your own"
                )
            return self.levels[depth].child_bw
        raise ValueError(f"unknown link {link!r}\n  fix: give one of ici, line, hbm, sram, pcie, dcn, node, scale-out")

    def intensity(self, link: str = "hbm", dtype: str = "bf16", axes: int = 1) -> float:
        """FLOPs per byte at which computing takes as long as the link: the book's alpha = C / W."""
        return self.flops(dtype) / self.bandwidth(link, axes)

    def wraps(self, shape: int | Sequence[int]) -> tuple[bool, ...]:
        """Which axes of a slice are rings (Part 2, "TPU Networking"); an axis given alone is taken as its own slice.

        v5e, v6e: axes as long as the pod's (16). v4p, v5p, 7x: all of a slice made of whole 4x4x4 cubes, else none.
        """
        lengths = check_slice(self, shape)
        if self.wrap == "full" and not self.pod:
            raise ValueError(
                f"{self.name} ({self.kind}) has no pod, whose length says which axes are rings"
                "\n  fix: give wrap=True or wrap=False"
            )
        if self.wrap == "full":
            return tuple(length in self.need("pod") for length in lengths)
        if self.wrap == "cubes":
            return (all(length % 4 == 0 for length in lengths),) * len(lengths)
        return (self.wrap == "all",) * len(lengths)


def _numbers(chip: Chip) -> Iterator[tuple[str, float]]:
    """Every number of a chip with its name, for checking."""
    for field in fields(chip):
        value = getattr(chip, field.name)
        if field.name == "peaks":
            yield from ((f"flops.{dtype}", peak) for dtype, peak in value)
        elif field.name in ("pod", "host"):
            yield from ((field.name, length) for length in value or ())
        elif field.name in ("levels", "measured"):
            for part in value:
                found = [(f.name, getattr(part, f.name)) for f in fields(part) if f.type not in (str, bool)]
                yield from ((f"{field.name}.{name}", number) for name, number in found if number is not None)
        elif field.name not in ("name", "kind", "source", "wrap", "axes", "efficiency") and value is not None:
            yield field.name, value


def _check_axes(chip: Chip, axes: int) -> None:
    """ValueError unless the chip has that many torus axes."""
    if not isinstance(axes, int) or not 1 <= axes <= chip.need("axes"):
        raise ValueError(
            f"{axes} axes: {chip.name} has {chip.axes} (its network is a {chip.axes}D torus)"
            "\n  fix: choose at least 1 axis and no more than the torus has"
        )


def check_slice(chip: Chip, shape: int | Sequence[int]) -> tuple[int, ...]:
    """The lengths of a slice's axes as a tuple; ValueError if the chip's pod has no such slice."""
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    _check_axes(chip, len(lengths))
    if not all(isinstance(length, int) and length >= 1 for length in lengths):
        raise ValueError(f"slice {lengths}: the lengths of axes are positive whole numbers\n  fix: give 4x4x4, say")
    pod = sorted(chip.pod or (), reverse=True)
    if any(length > most for length, most in zip(sorted(lengths, reverse=True), pod, strict=False)):
        raise ValueError(
            f"slice {'x'.join(map(str, lengths))}: a pod of {chip.name} is {'x'.join(map(str, chip.pod or ()))}"
            "\n  fix: choose a slice that lies inside the pod"
        )
    return lengths
