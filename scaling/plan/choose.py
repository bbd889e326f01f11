"""The mesh for a training run: `python -m scaling.train --plan`.

Each mesh that is offered was counted by the run's own step, and fits: its bytes, FLOPs and memory are the dry run's,
its seconds their price on the chip. On a machine whose chip file was measured (`scaling.measure`) that is every mesh of
so many ranks that the model and the batch allow; on a chip of the catalogue the first ones in the order of
`scaling.plan`, which evaluates thousands of meshes by formula.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scaling.common import tables
from scaling.configs import Config
from scaling.hardware import Chip
from scaling.mesh import AbstractMesh
from scaling.plan import report
from scaling.plan.candidates import plans, splits
from scaling.plan.evaluate import Estimate
from scaling.plan.job import Fixed, Job, Layout
from scaling.plan.network import slice_shape
from scaling.plan.transformer_step import predict_transformer
from scaling.spec import ShardingError
from scaling.spec.sizes import format_sizes
from scaling.train import dry
from scaling.train.settings import DTYPES, Settings

OFFERED = 6  # meshes that are shown
TRIED = 64  # the most ranks for which every mesh's own code is counted
AXES = {"pod": "P", "data": "P", "pipe": "Z", "fsdp": "X", "context": "C", "tensor": "Y", "expert": "E"}


@dataclass(frozen=True)
class MeshChoice:
    """A mesh for a run: seconds of a step, bytes of its fullest rank, and of the step the seconds of products, of what
    lies between them, and of its collectives by axes."""

    sizes: dict[str, int]
    seconds: float
    memory: float
    math: float
    between: float
    comms: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        return format_sizes(self.sizes)


def meshes(settings: Settings, ranks: int) -> Iterator[dict[str, int]]:
    """Every mesh of so many ranks, axes of size 1 left out; E only for experts."""
    for sizes in splits("PZXCYE" if settings.model.moe else "PZXCY", ranks, lambda *_: True):
        yield {axis: size for axis, size in sizes.items() if size > 1} or {"X": 1}


def choices(
    settings: Settings, ranks: int, chip: Chip, backend: str = "gloo", most: int = OFFERED
) -> tuple[list[MeshChoice], list[str]]:
    """(the meshes that the run fits on, the fastest first; of the others the mesh and why not). `backend`: whose
    buffers are counted, as `dry.count` has it; of a chip of the catalogue so many meshes at `most`."""
    if chip.measured and ranks > TRIED:
        raise ValueError(
            f"{ranks} ranks: only meshes of up to {TRIED} ranks are tried\n"
            "  fix: ask python -m scaling.plan for a larger one"
        )
    found: list[MeshChoice] = []
    refused: list[str] = []
    for sizes in meshes(settings, ranks) if chip.measured else planned(settings, ranks, chip, refused):
        try:
            found.append(counted_choice(settings, sizes, chip, backend))
        except (ShardingError, ValueError) as error:
            refused.append(f"{format_sizes(sizes)}: {str(error).splitlines()[0]}")
        if not chip.measured and len(found) == most:
            break
    return sorted(found, key=lambda choice: (choice.seconds, len(choice.sizes))), refused


def counted_choice(settings: Settings, sizes: dict[str, int], chip: Chip, backend: str) -> MeshChoice:
    """A mesh by the count of the run's own step. ValueError where the run does not fit."""
    room = dry.ROOM * chip.need("hbm_bytes")
    if (memory := dry.fullest(settings, sizes, backend, room).memory) > room:
        raise ValueError(f"a rank needs {memory / 1e9:.2f} GB\n  fix: choose another mesh")
    shape = slice_shape(chip, AbstractMesh(sizes).size()) if chip.kind == "tpu" and not chip.measured else ()
    step = predict_transformer(settings, sizes, chip, shape)
    part = step.fullest
    return MeshChoice(sizes, step.seconds, memory, part.math, part.between, part.comms)


def planned(settings: Settings, ranks: int, chip: Chip, refused: list[str]) -> Iterator[dict[str, int]]:
    """The meshes of so many chips of the catalogue, the fastest first by the planner's formulas; of those that they
    refuse the reason is added to `refused`. Params are sharded over X and replicated over P, stages by 1F1B."""
    seen: set[str] = set()
    for one in sorted(evaluated(settings, chip, ranks), key=lambda one: (not one.fits, float(one.forecast))):
        sizes = mesh_of(one.layout)
        name = format_sizes(sizes)
        if not one.fits:
            refused.append(f"{name}: a chip needs {float(one.held.total) / 1e9:.2f} GB")
        elif why := uneven(settings, sizes):
            refused.append(f"{name}: {why}")
        elif name not in seen:
            seen.add(name)
            yield sizes


def mesh_of(layout: Layout) -> dict[str, int]:
    """The run's axes for a layout's, those of size 1 left out."""
    sizes: dict[str, int] = {}
    for axis, size in layout.sizes.items():
        if size > 1:
            sizes[AXES[axis]] = sizes.get(AXES[axis], 1) * size
    return {axis: sizes[axis] for axis in "PZXCYE" if axis in sizes} or {"X": 1}


def uneven(settings: Settings, sizes: Mapping[str, int]) -> str:
    """Why the run's arrays do not divide over a mesh, or nothing: the planner's formulas round up."""
    try:
        _, (tokens, *_) = dry.step_shapes(settings, AbstractMesh(sizes))
    except (ShardingError, ValueError) as error:
        return str(error).splitlines()[0]
    rows = len(tokens)
    return f"{rows} rows do not make {settings.microbatches} microbatches" if rows % settings.microbatches else ""


def evaluated(settings: Settings, chip: Chip, ranks: int) -> Iterator[Estimate]:
    """The meshes with params sharded over X, and those without X, by formula. ValueError if there are none."""
    wide = settings.dtype == "bf16"
    job = Job(
        settings.model, settings.batch * settings.seq, settings.seq, settings.dtype, 2 if wide else 4,
        4, 12 if wide else 8, shards=("fsdp",),
    )  # fmt: skip
    fixed = Fixed((), settings.remat, settings.microbatches, "1f1b", reduce="once")
    failures: list[ValueError] = []
    for zero in (3, 0):
        try:
            yield from plans(job, chip, ranks, replace(fixed, zero=zero))
        except ValueError as error:
            failures.append(error)
    if len(failures) == 2:
        raise failures[0]


def table(found: list[MeshChoice], refused: list[str], top: int = OFFERED) -> str:
    """The meshes, the fastest first, and what is said of the choice."""
    rows = []
    for c in found[:top]:
        comms = sum(seconds for _, seconds in c.comms)
        numbers = [1e3 * t for t in (c.seconds, c.math, c.between, comms)]
        rows.append((c.name, *(f"{n:,.1f}" for n in numbers), f"{c.memory / 1e9:.3f}"))
    head = ["mesh", "ms a step", "products", "between", "collectives", "GB a rank"]
    lines = [tables.table(rows, head), reason(found)]
    lines += [f"{len(found)} meshes were compared" + (f", {len(refused)} do not suit, such as" if refused else "")]
    return "\n".join([*lines, *(f"  {why}" for why in refused[:3])])


def reason(found: list[MeshChoice]) -> str:
    """Why the first one."""
    best = found[0]
    if len(found) == 1:
        return f"{best.name}: the only mesh that suits"
    other = found[1]
    parts: Mapping[str, float] = {
        "products": other.math - best.math, "what lies between": other.between - best.between,
        "collectives": sum(s for _, s in other.comms) - sum(s for _, s in best.comms),
    }  # fmt: skip
    most = max(parts, key=lambda name: parts[name])
    gain = other.seconds / best.seconds - 1
    why = f"; it saves most in {most}, {1e3 * parts[most]:,.1f} ms" if parts[most] > 0 else ""
    return f"{best.name}: forecast {gain:.1%} faster than {other.name}{why}"


def command_line(given: Sequence[str], sizes: Mapping[str, int]) -> str:
    """The command of a run with these arguments, on a mesh that was chosen."""
    kept: list[str] = []
    for before, word in zip(["", *given], given, strict=False):
        of_plan = before == "--plan" and word.isdigit()
        if before != "--mesh" and not of_plan and not word.startswith(("--plan", "--mesh", "--dry-run")):
            kept.append(word)
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    return shlex.join(["python", "-m", "scaling.train", *kept, "--mesh", mesh])


def own_run(job: Job, chip: Chip, chips: int, best: Layout, model: str) -> list[str]:
    """What `scaling.train` makes of a plan: the command of the best mesh on which it runs and fits, with what its step
    moves and holds by its own count; or why there is none. Lines of text."""
    lines = ["This code runs it (params sharded over X, gradients summed in float32, AdamW) as"]
    if job.dtype not in DTYPES or not isinstance(job.config, Config) or job.batch % job.seq:
        return ["This code runs no such step: whole sequences, and " + ", ".join(DTYPES)]
    settings = Settings(
        job.config, "", "", job.sequences, job.seq, microbatches=best.microbatches, dtype=job.dtype, remat=best.remat
    )
    try:
        found, refused = choices(settings, chips, chip, "abstract", most=1)
    except ValueError as error:
        found, refused = [], [str(error).splitlines()[0]]
    if not found:
        return ["This code runs it on no mesh of as many chips:", *(f"  {why}" for why in refused[:3])]
    options = {"model": model, "batch": job.sequences, "seq": job.seq, "microbatches": best.microbatches}
    options |= {"dtype": job.dtype, "remat": best.remat}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    step = dry.fullest(settings, found[0].sizes, "abstract")
    sent = ", ".join(f"{axes} {report.size(calls.sent)}" for axes, calls in step.by_axes().items() if calls.sent)
    lines += ["  " + command_line([*given, "--device", "cuda"], found[0].sizes)]
    said = f"  By its own count (--dry-run): {report.size(step.memory)} a rank"
    return [*lines, f"{said}; sent in a step over {sent}" if sent else said]
