"""Chips and their links as data: `chip("v5p")`, the book's other values as `chip("v6e", variant="part1")`, or your own.

SI units throughout: FLOPs/s, bytes, bytes/s, seconds; a price in dollars per chip and hour. `None` is what the book
does not say. The numbers, with their places in the book, are in chips.toml; `load_chip` reads a file of the same form.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from scaling.spec import DTYPE_BYTES

KINDS = ("tpu", "gpu", "cpu")
COUNTS = ("pod", "host", "degree", "links", "switches", "ports", "ranks", "cores", "mxus", "mxu", "vector_alus", "sms")
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "float32": "fp32", "f32": "fp32", "uint8": "int8"}
ALIASES |= {"float64": "fp64", "f64": "fp64", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Level:
    """One level of a tree of switches: a unit has `degree` children, each on `links` links of `link_bw` bytes/s.

    `switches` in a unit, with `ports` ports each of `link_bw`, if known.
    """

    name: str
    degree: int
    link_bw: float
    links: int = 1
    switches: int | None = None
    ports: int | None = None

    @property
    def child_bw(self) -> float:
        """Bytes/s between one child and the unit's switches, each way."""
        return self.links * self.link_bw


@dataclass(frozen=True)
class Measured:
    """A collective as measured over `ranks`: seconds = latency + V / bandwidth, V as in `scaling.cost.collectives`."""

    op: str
    ranks: int
    latency: float
    bandwidth: float


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

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"chip {self.name}: kind is {self.kind!r}, not one of {KINDS}")
        if self.wrap not in (None, "full", "cubes", "all", "none"):
            raise ValueError(f"chip {self.name}: wrap is {self.wrap!r}, not one of 'full', 'cubes', 'all', 'none'")
        if isinstance(self.axes, bool) or not isinstance(self.axes, int) or self.axes < 0:
            raise ValueError(f"chip {self.name}: axes is {self.axes!r}: give the number of axes of its torus")
        for name, value in numbers(self):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"chip {self.name}: {name} is {value!r}: give a positive number, in SI units")
            if name.rpartition(".")[2] in COUNTS and not isinstance(value, int):
                raise ValueError(f"chip {self.name}: {name} is {value!r}: give a whole number")
        if self.pod and len(self.pod) != self.axes:
            raise ValueError(f"chip {self.name}: pod {self.pod} has {len(self.pod)} axes, but axes = {self.axes}")

    def flops(self, dtype: str = "bf16") -> float:
        """Peak matmul FLOPs/s in `dtype`; ValueError if the chip has no such units (or the book no such number)."""
        dtype = ALIASES.get(str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
        if dtype not in dict(self.peaks):
            has = ", ".join(name for name, _ in self.peaks) or "no dtype at all"
            raise ValueError(f"{self.name} has no FLOPs/s for {dtype}: its table has {has}")
        return dict(self.peaks)[dtype]

    def need(self, field: str):
        """The value of a field, or a ValueError that says the chip lacks it."""
        value = getattr(self, field)
        if value in (None, (), 0):
            raise ValueError(
                f"{self.name} ({self.kind}) has no {field}: give a chip that has, or a chip file of your own"
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

    def bandwidth(self, link: str, axes: int = 1) -> float:
        """Bytes/s of one chip's share of a link, as the closed forms of Parts 5 and 12 use it.

        "ici": both directions of `axes` rings; "line": `axes` axes without wraparound; "hbm", "sram", "pcie", "dcn";
        "node": a GPU into its node; "scale-out": a *node* into the network, to which Part 12 holds C of one GPU.
        """
        if link in ("ici", "line"):
            check_axes(self, axes)
            return axes * (self.ici_bw if link == "ici" else self.need("link_bw"))
        if link in ("hbm", "sram", "pcie", "dcn"):
            return self.need(f"{link}_bw")
        if link in ("node", "scale-out"):
            depth = ("node", "scale-out").index(link)
            if len(self.need("levels")) <= depth:
                raise ValueError(f"{self.name}: nothing is known of its network beyond the node")
            return self.levels[depth].child_bw
        raise ValueError(f"unknown link {link!r}: one of ici, line, hbm, sram, pcie, dcn, node, scale-out")

    def intensity(self, link: str = "hbm", dtype: str = "bf16", axes: int = 1) -> float:
        """FLOPs per byte at which computing takes as long as the link: the book's alpha = C / W."""
        return self.flops(dtype) / self.bandwidth(link, axes)

    def wraps(self, shape: int | Sequence[int]) -> tuple[bool, ...]:
        """Which axes of a slice are rings (Part 2, "TPU Networking"); an axis given alone is taken as its own slice.

        v5e, v6e: axes as long as the pod's (16). v4p, v5p, 7x: all of a slice made of whole 4x4x4 cubes, else none.
        """
        lengths = check_slice(self, shape)
        if self.wrap == "full":
            return tuple(length in self.need("pod") for length in lengths)
        if self.wrap == "cubes":
            return (all(length % 4 == 0 for length in lengths),) * len(lengths)
        return (self.wrap == "all",) * len(lengths)


def numbers(chip: Chip):
    """Every number of a chip with its name, for checking."""
    for field in fields(chip):
        value = getattr(chip, field.name)
        if field.name == "peaks":
            yield from ((f"flops.{dtype}", peak) for dtype, peak in value)
        elif field.name in ("pod", "host"):
            yield from ((field.name, length) for length in value or ())
        elif field.name in ("levels", "measured"):
            for part in value:
                found = [(f.name, getattr(part, f.name)) for f in fields(part) if f.type is not str]
                yield from ((f"{field.name}.{name}", number) for name, number in found if number is not None)
        elif field.name not in ("name", "kind", "source", "wrap", "axes") and value is not None:
            yield field.name, value


def check_axes(chip: Chip, axes: int) -> None:
    """ValueError unless the chip has that many torus axes."""
    if not isinstance(axes, int) or not 1 <= axes <= chip.need("axes"):
        raise ValueError(f"{axes} axes: {chip.name} has {chip.axes} (its network is a {chip.axes}D torus)")


def check_slice(chip: Chip, shape: int | Sequence[int]) -> tuple[int, ...]:
    """The lengths of a slice's axes as a tuple; ValueError if the chip's pod has no such slice."""
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    check_axes(chip, len(lengths))
    if not all(isinstance(length, int) and length >= 1 for length in lengths):
        raise ValueError(f"slice {lengths}: the lengths of axes are positive whole numbers")
    pod = sorted(chip.pod or (), reverse=True)
    if any(length > most for length, most in zip(sorted(lengths, reverse=True), pod, strict=False)):
        raise ValueError(f"slice {'x'.join(map(str, lengths))}: a pod of {chip.name} is {'x'.join(map(str, chip.pod))}")
    return lengths


def chip(name: str, variant: str | None = None) -> Chip:
    """A chip of the book, by name ("v5p", "h100"), or of a TOML file, by its path ("mine.toml").

    `variant`: another value which the book's text uses, e.g. chip("v6e", "part1"); ValueError lists what there is.
    """
    if str(name).endswith(".toml"):
        return load_chip(name, variant)
    key = name.lower().removeprefix("tpu").strip(" -_")
    if key not in registry():
        raise ValueError(f"unknown chip {name!r}: one of {', '.join(registry())}, or the path of a .toml file")
    return build(key, registry()[key], variant)


def chips() -> tuple[str, ...]:
    """The names of the book's chips."""
    return tuple(registry())


def variants(name: str) -> tuple[str, ...]:
    """The names of the other values that the book has for a chip."""
    return tuple(registry()[chip(name).name].get("variants", ()))


def load_chip(path: str | Path, variant: str | None = None) -> Chip:
    """A chip from a TOML file: the fields of `Chip`, with `[flops]` by dtype, `[[levels]]`, `[[measured]]`.

    `base = "h100"` starts from a chip of the book, so that only what differs need be given:

        base = "h100"
        name = "our-h100"
        hbm_bw = 3.1e12
        [flops]
        bf16 = 8.0e14
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    try:
        return build(data.get("name", Path(path).stem), data, variant)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


@cache
def registry() -> Mapping[str, dict]:
    return tomllib.loads(Path(__file__).with_name("chips.toml").read_text(encoding="utf-8"))


def merge(below: Mapping, above: Mapping) -> dict:
    """`above` laid over `below`; tables are merged key by key."""
    both = dict(below) | dict(above)
    if "flops" in below and "flops" in above:
        both["flops"] = below["flops"] | above["flops"]
    return both


def build(name: str, data: Mapping, variant: str | None = None) -> Chip:
    """The Chip that a table of a TOML file describes."""
    if base := data.get("base"):
        if base not in registry():
            raise ValueError(f"unknown base {base!r}: one of {', '.join(registry())}")
        below = {key: value for key, value in registry()[base].items() if key not in ("variants", "source")}
        data = merge(below, data)
    if variant is not None:
        if variant not in data.get("variants", {}):
            raise ValueError(
                f"{name} has no variant {variant!r}: it has {', '.join(data.get('variants', {})) or 'none'}"
            )
        data = merge(data, data["variants"][variant])
    data = {key: value for key, value in data.items() if key not in ("base", "variants", "name")}
    peaks = data.pop("flops", {})
    if unknown := set(data) - {field.name for field in fields(Chip)} | set(peaks) - set(DTYPE_BYTES):
        raise ValueError(
            f"unknown field {sorted(unknown)}: fields are those of scaling.hardware.Chip, and flops.<dtype>"
        )
    if "kind" not in data:
        raise ValueError(f"kind is missing: one of {KINDS}")
    for key in ("pod", "host"):
        if key in data:
            data[key] = tuple(data[key])
    data["levels"] = tuple(Level(**level) for level in data.get("levels", ()))
    data["measured"] = tuple(Measured(**row) for row in data.get("measured", ()))
    return Chip(name=name, peaks=tuple(peaks.items()), **data)
