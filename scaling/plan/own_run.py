"""The command of `scaling.train` that runs a plan's layout, or the reason why none does (`scaling.plan --run`)."""

from scaling.hardware import Chip
from scaling.plan import report
from scaling.plan.choose import OPEN, choices, command_line, counted_choice, mesh_of, uneven
from scaling.plan.job import ANY, Fixed, Job, Layout
from scaling.plan.transformer_step import cost_table
from scaling.train import dry
from scaling.train.settings import DTYPES, Settings


def own_run(
    job: Job, chip: Chip, chips: int, best: Layout, model: str, explain: bool = False, fixed: Fixed = ANY
) -> list[str]:
    """Return what `scaling.train` makes of a plan, in lines of text.

    The lines have the command that runs the layout, and the bytes that its step sends and holds by its own count. If it
    does not fit by that count, more microbatches are tried. If `scaling.train` cannot run the layout, or it still does
    not fit, they have the reason, and the command of the cheapest mesh that runs. With `explain` they also have the
    lines of the step with their cost. The options in `fixed` do not change, except for the mesh.

    The job's `shards` must be ("fsdp",).
    """
    if job.dtype not in DTYPES or job.batch % job.seq:
        return ["This code runs no such step: whole sequences, and " + ", ".join(DTYPES)]
    settings = Settings(
        job.config, "", "", job.sequences, job.seq, microbatches=best.microbatches, dtype=job.dtype, remat=best.remat,
        zero=best.zero, pipeline=best.pipeline, reduce=best.reduce,
    )  # fmt: skip
    left_open = [name for name in OPEN if getattr(fixed, {"pipeline": "schedule"}.get(name, name)) is None]
    refused: list[str] = []
    try:
        if why := uneven(settings, mesh_of(best)):
            raise ValueError(why)
        more = [name for name in left_open if name == "microbatches"]
        chosen = counted_choice(settings, mesh_of(best), chip, "abstract", more)
        M, fits = chosen.settings.microbatches, ""
        if best.microbatches < M:
            fits = f", in {M} microbatches, because it does not fit in {best.microbatches}"
        lines = [f"This code runs it (gradients summed in float32, AdamW with float32 masters{fits}) as"]
    except ValueError as error:
        lines = [f"This code does not run that layout: {str(error).splitlines()[0]}"]
        try:
            found, refused = choices(settings, chips, chip, "abstract", chosen=left_open)
        except ValueError as another:
            found, refused = [], [str(another).splitlines()[0]]
        if not found:
            return [*lines, "and it runs the job on no mesh of as many chips:", *(f"  {why}" for why in refused[:3])]
        chosen = found[0]
        lines += [f"It runs the job on {chosen.name} as"]
    options = {"model": model, "batch": job.sequences, "seq": job.seq, "dtype": job.dtype}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    over = dry.fullest(chosen.settings, chosen.sizes, "abstract").by_axes().items()
    sent = ", ".join(f"{axes} {report.size(calls.sent)}" for axes, calls in over if calls.sent)
    device = {"gpu": ["--device", "cuda"]}.get(chip.kind, [])
    lines += ["  " + command_line([*given, *device], chosen)]
    if chip.kind == "tpu":
        lines += ["  on CPUs or GPUs, because PyTorch on TPUs is not supported here"]
    said = f"  By its own count (--dry-run): {chosen.seconds:.3g} s a step, {report.size(chosen.memory)} a rank"
    lines += [f"{said}; sent in a step over {sent}" if sent else said]
    return [*lines, "", *cost_table(chosen.step.fullest).splitlines()] if explain else lines
