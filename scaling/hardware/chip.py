"""One chip as data: its rates, its memories and its links.

All units are SI units: FLOPs/s, bytes, bytes/s, seconds; a price is in dollars per chip and hour. `None` is unknown.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from scaling.common.arguments import check_fields, check_within, of_type, one_of, whole

CHIP_KINDS = ("tpu", "gpu", "cpu")
LINKS = ("ici", "line", "hbm", "sram", "pcie", "dcn", "node", "scale-out")
LENGTHS = ("pod", "slices", "host")  # of the axes
WRAPS = (None, "full", "cubes", "all", "none")
LEAST = {"flops": 1e6, "_bytes": 1e3, "_bw": 1e5, "bandwidth": 1e3, "clock": 1e6, "clock_base": 1e6}  # for any chip
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "float32": "fp32", "f32": "fp32", "uint8": "int8"}
ALIASES |= {"float64": "fp64", "f64": "fp64", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Level:
    """One level of a tree of switches: a unit has `degree` children, each on `links` links of `link_bw` bytes/s.

    A unit has `switches` switches, if known, with `ports` ports of `link_bw` each. If `switched` is false there are no
    switches, and each pair of children has dedicated links (MI300X); a child in a group of d children then uses
    (d - 1)/(degree - 1) of its links.
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
        """Bytes/s of one child each way, into the unit's switches or over all its links to the other children."""
        return self.links * self.link_bw

    def group_bw(self, children: int) -> float:
        """Return the bytes/s that each child can send, and receive, in a group of this many children of a switch."""
        return self.child_bw * (1 if self.switched or children < 2 else (children - 1) / (self.degree - 1))


@dataclass(frozen=True)
class Measured:
    """A collective as measured over `ranks`: seconds = latency + V / bandwidth, V as in `scaling.cost.collectives`.

    `alone` says that all other ranks of the machine were idle, instead of running the collective in their own groups.
    """

    op: str
    ranks: int
    latency: float
    bandwidth: float
    alone: bool = False


@dataclass(frozen=True)
class Efficiency:
    """The shares of its peaks that a chip reaches in a training step, used in forecasts and never in bounds."""

    matmul: tuple[tuple[str, float], ...] = (("bf16", 1.0),)  # (dtype, share of its peak); other dtypes have bf16's
    attention: float = 1.0  # share of the bf16 peak in an attention kernel
    memory: float = 1.0  # share of hbm_bw in operations other than matmuls
    links: float = 1.0  # share of the links' bytes/s
    # share of the collectives on the critical path (over tensor, context and expert axes) that matmuls hide
    hidden: float = 0.0
    cores: float = 0.0  # share of the chip's cores that a collective takes from the matmuls that hide it
    narrow: float = 0.0  # the width F of an expert at which its products reach half of what wide ones do
    routing: float = 0.0  # seconds that a layer of experts takes in a forward pass beside its bytes: sorting, launches
    launch: float = 0.0  # the least seconds that a collective takes

    def __post_init__(self):
        within = dict.fromkeys(("attention", "memory", "links"), "(0, 1]") | dict.fromkeys(
            ("hidden", "cores"), "[0, 1]"
        )
        within |= dict.fromkeys(("launch", "routing"), "[0, 1)") | {"narrow": "[0, 1e6)"}
        check_fields(self, "efficiency.", within)
        for dtype, share in self.matmul:
            check_within(f"efficiency.matmul.{dtype}", share, "(0, 1]")

    def of_matmul(self, dtype: str) -> float:
        """Return the share of the peak in `dtype` that matmuls reach."""
        shares = dict(self.matmul)
        return shares.get(dtype, shares.get("bf16", 1.0))


@dataclass(frozen=True)
class Chip:
    """One accelerator with its memories and links; bandwidths are one-way bytes/s unless their name says otherwise."""

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
    slices: tuple[int, ...] | None = None  # the longest sides of a slice, where switches shape it unlike the pod
    host: tuple[int, ...] | None = None
    link_bw: float | None = None
    # the axes of a slice that are rings: "full" (if as long as the pod's), "cubes" (all, in 4x4x4 cubes), "all", "none"
    wrap: str | None = None
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
    efficiency: Efficiency = field(default_factory=Efficiency)
    efficiency_of: str = ""  # the chip whose efficiency is assumed, as this one's is not known

    def __post_init__(self):
        of = f"chip {self.name}: "
        check_fields(self, of, {"kind": CHIP_KINDS, "wrap": WRAPS, "axes": "[0, inf)"})
        for table in ("levels", "measured"):
            for part in getattr(self, table):
                check_fields(part, f"{of}{table}.")
        for name, value in _numbers(self):
            check_within(f"{of}{name}", value, "(0, inf)")
            least = next((low for suffix, low in LEAST.items() if name.rpartition(".")[2].endswith(suffix)), 0)
            if value < (LEAST["flops"] if name.startswith("flops.") else least):
                raise ValueError(
                    f"{of}{name} is {value!r}: too little in SI units: 80 GB is 80e9"
                    "\n  fix: write bytes, bytes/s and FLOPs/s without prefixes"
                )
        for name in LENGTHS:
            for length in getattr(self, name) or ():
                of_type(f"{of}{name}", length, int)
        for name in ("pod", "slices"):
            lengths = getattr(self, name)
            if lengths and len(lengths) != self.axes:
                raise ValueError(
                    f"chip {self.name}: {name} {lengths} has {len(lengths)} axes, but axes = {self.axes}"
                    f"\n  fix: give {name} a length for each axis"
                )

    def flops(self, dtype: object = "bf16") -> float:
        """Return the peak matmul FLOPs/s in a dtype, torch's or its name; ValueError if the table has none for it."""
        dtype = ALIASES.get(str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
        if dtype not in dict(self.peaks):
            has = ", ".join(name for name, _ in self.peaks) or "no dtype at all"
            fix = (
                "choose one of them" if self.peaks else "choose a variant that has, such as v100:nvidia, or a chip file"
            )
            raise ValueError(f"{self.name} has no FLOPs/s for {dtype}: its table has {has}\n  fix: {fix}")
        return dict(self.peaks)[dtype]

    def need(self, field: str):
        """Return the value of a field; ValueError if the chip lacks it."""
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
        """The number of chips in a pod."""
        return math.prod(self.need("pod"))

    @property
    def longest(self) -> tuple[int, ...]:
        """The longest sides that a slice can have, the shortest first."""
        return tuple(sorted(self.slices or self.need("pod")))

    @property
    def host_chips(self) -> int:
        """The number of chips on a host."""
        return math.prod(self.need("host"))

    @property
    def node_gpus(self) -> int:
        """The number of GPUs in a node."""
        return self.need("levels")[0].degree

    def levels_for(self, gpus: int) -> tuple[Level, ...]:
        """Return the levels of a cluster of this many GPUs; the highest level gets as many children as it needs.

        Each child keeps its links: the network is a full fat tree, to which switches are added (Part 12, Quiz 3,
        Question 2). ValueError if the node is too small and the chip's file has no network beyond it.
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
        """Return the bytes/s of one chip's share of a link, as the closed forms of Parts 5 and 12 use it.

        `link` is "ici" for both directions of `axes` rings, "line" for `axes` axes without wraparound, "hbm", "sram",
        "pcie", "dcn", "node" for a GPU into its node, or "scale-out" for a *node* into the network, a bandwidth with
        which Part 12 compares C of one GPU.
        """
        if link in ("ici", "line"):
            _check_axes(self, axes)
            return axes * (self.ici_bw if link == "ici" else self.need("link_bw"))
        if link in ("node", "scale-out"):
            depth = ("node", "scale-out").index(link)
            if len(self.need("levels")) <= depth:
                raise ValueError(
                    f"{self.name}: nothing is known of its network beyond the node"
                    "\n  fix: choose a chip with a network, or add it to a chip file of your own"
                )
            return self.levels[depth].child_bw
        one_of("link", link, LINKS)
        return self.need(f"{link}_bw")

    def intensity(self, link: str = "hbm", dtype: str = "bf16", axes: int = 1) -> float:
        """Return the FLOPs per byte at which computation takes as long as the link, the book's alpha = C / W."""
        return self.flops(dtype) / self.bandwidth(link, axes)

    def wraps(self, shape: int | Sequence[int]) -> tuple[bool, ...]:
        """Return for each axis of a slice whether it is a ring (Part 2, "TPU Networking"); an int is a one-axis slice.

        On v5e and v6e the axes that are as long as the pod's (16) are rings. On v4p, v5p and 7x all axes are rings if
        the slice consists of whole 4x4x4 cubes, else none is.
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
    """Yield the name and the value of every number of a chip that must be positive."""
    yield from ((f"flops.{dtype}", peak) for dtype, peak in chip.peaks)
    yield from ((name, length) for name in LENGTHS for length in getattr(chip, name) or ())
    parts = [(f"{table}.", part) for table in ("levels", "measured") for part in getattr(chip, table)]
    for prefix, record in [("", chip), *parts]:
        for name, value in vars(record).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "axes":
                yield prefix + name, value


def _check_axes(chip: Chip, axes: int) -> None:
    """Raise ValueError unless the chip has that many torus axes."""
    if not isinstance(axes, int) or not 1 <= axes <= chip.need("axes"):
        raise ValueError(
            f"{axes} axes: {chip.name} has {chip.axes} (its network is a {chip.axes}D torus)"
            "\n  fix: choose at least 1 axis and no more than the torus has"
        )


def check_slice(chip: Chip, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of a slice's axes as a tuple; ValueError if the chip's pod has no such slice."""
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    _check_axes(chip, len(lengths))
    for length in lengths:
        whole(length=length)
    pods = [sorted(sides, reverse=True) for sides in (chip.pod, chip.slices) if sides]
    long = sorted(lengths, reverse=True)
    if pods and all(any(length > most for length, most in zip(long, pod, strict=False)) for pod in pods):
        raise ValueError(
            f"slice {'x'.join(map(str, lengths))}: a pod of {chip.name} is {'x'.join(map(str, chip.pod or ()))}"
            "\n  fix: choose a slice that lies inside the pod"
        )
    return lengths
