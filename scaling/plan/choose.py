"""The mesh and the recipe for a training run: `python -m scaling.train --plan`, `python -m scaling.plan --run`.

Each mesh that is offered was counted by the run's own step, and fits: its bytes, FLOPs and memory are the dry run's,
its seconds their price on the chip. On a machine whose chip file was measured (`scaling.measure`) that is every mesh of
these ranks that the model and the batch allow. On a chip of the catalogue it is the first ones in the order of
`scaling.plan`, which evaluates thousands of meshes by formula.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from scaling.common import console
from scaling.cost.memory import ROOM
from scaling.hardware import Chip
from scaling.mesh import AbstractMesh
from scaling.plan.candidates import plans, splits
from scaling.plan.evaluate import Estimate
from scaling.plan.job import SCHEDULES, Fixed, Job, Layout, run_bytes
from scaling.plan.network import slice_shape
from scaling.plan.ties import TIE, effort, settle_ties
from scaling.plan.transformer_step import StepForecast, predict_transformer
from scaling.spec import ShardingError
from scaling.spec.sizes import format_sizes
from scaling.train import dry
from scaling.train.settings import DTYPES, Settings
from scaling.train.structure import resolved

OFFERED = 4  # the meshes that are shown
TRIES = 12  # with a chip of the catalogue the search ends once so many meshes proved too full
TRIED = 64  # the most ranks for which every mesh's own code is counted
OPEN = "zero", "remat", "microbatches", "pipeline", "reduce"  # options that are chosen if a run does not give them
ZEROS = 3, 1  # the stages that are tried then; of equally fast ones the first is taken
CHUNKED = "interleaved:2"  # the schedule that is tried beside 1F1B; zero-bubble ones hold too much more
DOUBLED = 2  # how often the microbatches are doubled for a mesh that is too full
AXES = {"pod": "P", "data": "P", "pipe": "Z", "fsdp": "X", "context": "C", "tensor": "Y", "expert": "E"}
NAMES = {"P": "data", "Z": "pipe", "X": "fsdp", "C": "context", "Y": "tensor", "E": "expert"}


@dataclass(frozen=True)
class MeshChoice:
    """A mesh for a run, with the settings on it, the forecast of its step and the bytes of its fullest rank."""

    sizes: dict[str, int]
    settings: Settings
    step: StepForecast
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.step.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the fullest stage, by products, operations between them, and collectives."""
        part = self.step.fullest
        return {"products": part.math, "between": part.between, "collectives": sum(part.comms.values())}

    @property
    def name(self) -> str:
        """The mesh, with its stage of ZeRO and its schedule."""
        return mesh_name(self.sizes, self.settings)

    def effort(self, chip: Chip) -> tuple:
        """Return the planner's `effort` of the mesh, FSDP before ZeRO-1."""
        return *effort({NAMES[axis]: size for axis, size in self.sizes.items()}, chip), -self.settings.zero


def mesh_name(sizes: Mapping[str, int], settings: Settings) -> str:
    """Return "X=8 (ZeRO-1)": a mesh, ZeRO where X does not shard the params, and the schedule where it is not 1F1B."""
    words = [f"ZeRO-{settings.zero}"] if settings.zero != 3 and sizes.get("X", 1) > 1 else []
    words += filter(None, [settings.pipeline_on(sizes)])
    return format_sizes(sizes) + (f" ({', '.join(words)})" if words else "")


def meshes(settings: Settings, ranks: int) -> Iterator[dict[str, int]]:
    """Yield every mesh of this number of ranks, without axes of size 1. Only models with experts get an axis E."""
    for sizes in splits("PZXCYE" if settings.model.moe else "PZXCY", ranks, lambda *_: True):
        yield {axis: size for axis, size in sizes.items() if size > 1} or {"X": 1}


def choices(
    settings: Settings, ranks: int, chip: Chip, backend: str = "gloo", most: int = OFFERED,
    chosen: Sequence[str] = (),
) -> tuple[list[MeshChoice], list[str]]:  # fmt: skip
    """Return (the meshes that the run fits on, the fastest first except for ties; the reason against each other mesh).

    Args:
        settings: The run's settings.
        ranks: The number of ranks.
        chip: The chip that they run on.
        backend: The backend whose buffers are counted, as in `dry.count`.
        most: The number of meshes that are counted on a chip of the catalogue.
        chosen: The options of OPEN that are chosen for each mesh; the others are as in the settings.
    """
    if chip.measured and ranks > TRIED:
        raise ValueError(
            f"{ranks} ranks: only meshes of up to {TRIED} ranks are tried\n"
            "  fix: ask python -m scaling.plan for a larger one"
        )
    if settings.dtype not in (peaks := dict(chip.peaks)):
        known = [dtype for dtype in peaks if dtype in DTYPES]
        fix = f"give --dtype {known[0]}" if known else "choose another chip"
        raise ValueError(f"{chip.name} has no FLOPs/s for {settings.dtype}, only for {', '.join(peaks)}\n  fix: {fix}")
    found: list[MeshChoice] = []
    refused: list[str] = []
    if "pipeline" in chosen:
        settings = replace(settings, pipeline="1f1b")
    full = 0  # the number of meshes on which the run's own step does not fit
    for sizes, some in tried(settings, ranks, chip, refused, chosen):
        try:
            found.append(counted_choice(some, sizes, chip, backend, chosen))
        except (ShardingError, ValueError) as error:
            refused.append(f"{mesh_name(sizes, some)}: {str(error).splitlines()[0]}")
            full += "a rank needs" in refused[-1]
        if not chip.measured and (len(found) == most or full == TRIES):
            break
    found.sort(key=lambda choice: (choice.seconds, len(choice.sizes)))
    found = settle_ties(found, lambda choice: choice.seconds, lambda choice: choice.effort(chip))
    if found and "pipeline" in chosen and not chip.measured:
        found = [*faster_in_chunks(found[0], chip, backend), *found]
    return found, refused


def faster_in_chunks(best: MeshChoice, chip: Chip, backend: str) -> list[MeshChoice]:
    """Return [the mesh with interleaved stages], or [] if it is not faster, does not fit, or has none.

    Chunks have at least two layers: of single ones each would be traced, for minutes where there are many stages.
    """
    Z, some = best.sizes.get("Z", 1), replace(best.settings, pipeline=CHUNKED)
    if Z == 1 or best.settings.model.L < 4 * Z or uneven(some, best.sizes):
        return []
    try:
        found = counted_choice(some, best.sizes, chip, backend)
    except ValueError:
        return []
    return [found] if found.seconds < best.seconds else []


def tried(
    settings: Settings, ranks: int, chip: Chip, refused: list[str], chosen: Sequence[str]
) -> Iterator[tuple[dict[str, int], Settings]]:
    """Yield the meshes to count, each with its settings: all on a measured machine, else the `planned` ones."""
    zeros = ZEROS if "zero" in chosen else (settings.zero,)
    if not chip.measured:
        yield from planned(settings, ranks, chip, refused, zeros, chosen)
        return
    for sizes in meshes(settings, ranks):
        yield from ((sizes, replace(settings, zero=zero)) for zero in (zeros if "X" in sizes else zeros[:1]))


def counted_choice(settings: Settings, sizes: dict, chip: Chip, backend: str, chosen: Sequence[str] = ()) -> MeshChoice:
    """Return a mesh with the forecast of its step and the bytes of its fullest rank, from the run's own step.

    If the run does not fit, the options that are `chosen` are changed: microbatches are doubled, at most DOUBLED times,
    or else gradients are scattered after each, or else layers are recomputed.

    Raises:
        ValueError: The run does not fit.
    """
    room, needs = ROOM * chip.need("hbm_bytes"), []
    remats = dict.fromkeys((settings.remat, "block")) if "remat" in chosen else (settings.remat,)
    shards = "reduce" in chosen and settings.zero and sizes.get("X", 1) > 1
    reduces = dict.fromkeys((settings.reduce, "each")) if shards else (settings.reduce,)
    for remat, reduce in product(remats, reduces):
        for doubled in range(1 + DOUBLED * ("microbatches" in chosen)):
            some = replace(settings, remat=remat, reduce=reduce, microbatches=settings.microbatches << doubled)
            if doubled and uneven(some, sizes):
                break
            if reduce != settings.reduce and some.microbatches == 1:
                continue  # which changes nothing
            if (needed := dry.fullest(some, sizes, backend).memory) <= room:
                shape = () if chip.measured or chip.kind != "tpu" else slice_shape(chip, AbstractMesh(sizes).size())
                return MeshChoice(sizes, some, predict_transformer(some, sizes, chip, shape), needed)
            needs.append(needed)
            if needs[-1] > room * 2 ** (DOUBLED - doubled):  # a rank with half of the rows needs at least half
                break
    raise ValueError(f"a rank needs {min(needs) / 1e9:.2f} GB of {room / 1e9:.2f}\n  fix: choose another mesh")


def planned(
    settings: Settings, ranks: int, chip: Chip, refused: list[str], zeros: Sequence[int] = (3,),
    chosen: Sequence[str] = (),
) -> Iterator[tuple[dict[str, int], Settings]]:  # fmt: skip
    """Yield (mesh, settings on it) of `ranks` chips of the catalogue, the fastest first by the planner's formulas.

    `zeros` and `chosen` are as in `evaluated`. If the formulas refuse a mesh, the reason is added to `refused`.
    """
    seen: set[str] = set()
    found = [*evaluated(settings, chip, ranks, zeros, chosen)]
    for one in sorted(found, key=lambda one: (not one.fits, float(one.forecast), -one.layout.zero)):
        sizes, layout = mesh_of(one.layout), one.layout
        zero = layout.zero if "X" in sizes and layout.zero in zeros else zeros[0]
        reduce = layout.reduce if "reduce" in chosen else settings.reduce
        some = replace(settings, zero=zero, remat=layout.remat, microbatches=layout.microbatches, reduce=reduce)
        name = mesh_name(sizes, some)
        if not one.fits:
            refused.append(f"{name}: a chip needs {float(one.held.total) / 1e9:.2f} GB")
        elif why := uneven(some, sizes):
            refused.append(f"{name}: {why}")
        elif name not in seen:
            seen.add(name)
            yield sizes, some


def mesh_of(layout: Layout) -> dict[str, int]:
    """Return the run's axes longer than 1 and their sizes, for a layout; a run shards over X and not over P."""
    sizes: dict[str, int] = {}
    axes = AXES | ({"data": "X"} if layout.zero == 1 else {})
    for axis, size in layout.sizes.items():
        if size > 1:
            sizes[axes[axis]] = sizes.get(axes[axis], 1) * size
    return {axis: sizes[axis] for axis in "PZXCYE" if axis in sizes} or {"X": 1}


def uneven(settings: Settings, sizes: Mapping[str, int]) -> str:
    """Return why the run's arrays do not divide over a mesh, or ""; the planner's formulas round up instead."""
    try:
        resolved(settings, sizes)
    except (ShardingError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def evaluated(
    settings: Settings, chip: Chip, ranks: int, zeros: Sequence[int] = (3,), chosen: Sequence[str] = ()
) -> Iterator[Estimate]:
    """Yield the forecast of each mesh that has no X, or has X with one of the ZeRO stages `zeros`.

    Options named in `chosen` are chosen for each mesh, the best ones; the others are as in the settings.

    Raises:
        ValueError: No mesh suits.
    """
    job = Job(
        settings.model, settings.batch * settings.seq, settings.seq, settings.dtype, *run_bytes(settings.dtype),
        shards=("fsdp",),
    )  # fmt: skip
    given = {name: getattr(settings, name) for name in ("remat", "microbatches", "reduce") if name not in chosen}
    schedule, _, chunks = settings.pipeline.partition(":")
    known = schedule if schedule in SCHEDULES else "1f1b"
    fixed = Fixed(schedule=known, chunks=int(chunks) if chunks else None, **given)
    failures: list[ValueError] = []
    stages = {*(1 if zero == 2 else zero for zero in zeros), 0}  # the formulas know no 2
    for zero in stages:
        try:
            yield from plans(job, chip, ranks, replace(fixed, zero=zero))
        except ValueError as error:
            failures.append(error)
    if len(failures) == len(stages):
        raise failures[0]


def table(found: list[MeshChoice], refused: list[str], top: int = OFFERED) -> str:
    """Return the table of the meshes, the fastest first, with the reason for the choice."""
    rows = []
    for c in found[:top]:
        numbers = [1e3 * t for t in (c.seconds, *c.parts.values())]
        words = *(f"{n:,.1f}" for n in numbers), f"{c.memory / 1e9:.3f}", c.settings.remat
        rows.append((c.name, *words, f"{c.settings.microbatches}", c.settings.reduce))
    head = ["mesh", "ms a step", *found[0].parts, "GB a rank", "remat", "microbatches", "reduce"]
    lines = [console.table(rows, head), reason(found)]
    lines += [f"{len(found)} meshes were compared" + (f", {len(refused)} do not suit, such as" if refused else "")]
    return "\n".join([*lines, *(f"  {why}" for why in refused[:3])])


def reason(found: list[MeshChoice]) -> str:
    """Return why the first mesh was chosen."""
    best = found[0]
    if len(found) == 1:
        return f"{best.name}: the only mesh that suits"
    other = found[1]
    parts = {name: seconds - best.parts[name] for name, seconds in other.parts.items()}
    most = max(parts, key=lambda name: parts[name])
    gain = other.seconds / best.seconds - 1
    if gain < 0:
        return f"{best.name}: as fast as {other.name} within {TIE:.0%}, and asks less of the network or of the reader"
    why = f"; it saves most in {most}, {1e3 * parts[most]:,.1f} ms" if parts[most] > 0 else ""
    return f"{best.name}: forecast {gain:.1%} faster than {other.name}{why}"


def command_line(given: Sequence[str], chosen: MeshChoice) -> str:
    """Return the command of a run with these arguments, on a mesh that was chosen."""
    kept: list[str] = []
    for before, word in zip(["", *given], given, strict=False):
        of_plan = before == "--plan" and word.isdigit()
        if before != "--mesh" and not of_plan and not word.startswith(("--plan", "--mesh", "--dry-run")):
            kept.append(word)
    defaults = {field.name: field.default for field in fields(Settings)}
    for name in OPEN:
        if (value := getattr(chosen.settings, name)) != defaults[name] and not is_said(name, kept):
            kept += [f"--{name}", str(value)]
    mesh = ",".join(f"{axis}={size}" for axis, size in chosen.sizes.items())
    return shlex.join(["python", "-m", "scaling.train", *kept, "--mesh", mesh])


def is_said(name: str, words: Sequence[str]) -> bool:
    """Return whether an option is among the words of a command."""
    return any(word.split("=")[0] == f"--{name}" for word in words)
