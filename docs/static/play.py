"""What the site's pages ask of the library, without torch. An illegal line is its own error."""

import io
import json
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from types import MappingProxyType

from scaling import algebra, configs, cost, hardware
from scaling.algebra.law import check_product
from scaling.algebra.rules import collective_steps
from scaling.check.files import KINDS
from scaling.cost.collectives import seconds_on
from scaling.cost.transformer import num_params
from scaling.exercise.judge import assess
from scaling.exercise.page import exercise_named
from scaling.show import svg
from scaling.show.frames import frames_of
from scaling.show.params import leaf_rows
from scaling.show.shardings import remarks
from scaling.show.timelines import main as show_schedule
from scaling.spec import ShardingError, format_axes, parse, parse_line
from scaling.spec.sizes import parse_mesh, parse_sizes

DIM = 4096  # of a dim whose size is not given


def answer(name: str, given: str) -> str:
    """What `name` answers to the fields of its form, as JSON: `text`, and for some `picture`, an SVG, or `right`."""
    try:
        said = ASKED[name](**json.loads(given))
    except (ShardingError, ValueError) as error:
        said = str(error)
    return json.dumps({"text": said} if isinstance(said, str) else said)


def exercise(exercise: str, text: str) -> dict:
    """The verdict on an answer, and whether it is right."""
    right, message = assess(exercise_named(exercise), text)
    return {"text": ("right: " if right else "not yet: ") + message, "right": right}


def check(call: str, line: str) -> "str | dict":
    """Whether a line is legal as such a call, and what it does to the axes."""
    if call == "einsum":
        check_product(line)
        read = parse_line(line)
        product = f"{read.result} = {' * '.join(map(str, read.operands))}"
        return {"text": f"legal: {read}", "picture": player([product])}
    steps = collective_steps(KINDS[call], line)
    does = [f"{KINDS[call]} over {', '.join(step.axes)}: {step.before} -> {step.after}" for step in steps]
    if not does:
        return "legal, and there is nothing to do"
    name = parse_line(line).operands[0].name
    moves = (f"{name}{step.after} = {KINDS[call]}_{format_axes(step.axes)}({name}{step.before})" for step in steps)
    return {"text": "\n".join(["legal:", *does]), "picture": player(moves)}


def devices(types: str, mesh: str, sizes: str = "") -> dict:
    """Which device holds what."""
    axes, said = parse_mesh(mesh), []
    for spec in map(parse, types.split(";")):
        shape = f" of {list(spec.local_shape(_sizes(sizes), axes))}" if sizes.strip() else ""
        said.append(f"{spec}: each device holds a block{shape}{remarks(spec, axes)}")
    return {"text": "\n".join(said), "picture": svg.types(types.split(";"), axes)}


def run(text: str) -> str:
    """What a program prints, or how it fails."""
    said = io.StringIO()
    with redirect_stdout(said):
        try:
            exec(compile(text, "your program", "exec"), {"__name__": "__main__"})
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return said.getvalue().rstrip() or "It printed nothing."


def player(lines: Iterable[str], title: str = "") -> str:
    """The frames of a listing's lines, in HTML, with two devices along each axis; an open line is left out."""
    frames = frames_of(line for line in lines if not line.endswith("..."))
    types = (spec for frame in frames for spec in (*frame.read, *frame.held.values()))
    mesh = dict.fromkeys(sorted({axis for spec in types for axis in spec.axes + spec.unreduced}), 2)
    return svg.player(frames, mesh, title) if len(mesh) <= 3 else ""


def reshard(line: str, mesh: str, sizes: str, chip: str) -> str:
    """The cheapest way from a type to another, with what it sends and how long it takes."""
    return _priced(algebra.reshard, _types(line, 1), mesh, sizes, chip)


def matmul(line: str, mesh: str, sizes: str, chip: str) -> str:
    """The cheapest way to a product, which may need collectives, and its case."""
    return _priced(algebra.matmul, _types(line, 2), mesh, sizes, chip)


def derive(line: str) -> dict:
    """The listing of a chain of products, forward and backward, as the book writes it."""
    program = algebra.derive(line)
    passes = {"Forward": program.forward, "Backward": program.backward}
    return {"text": str(program), "picture": "".join(player(map(str, steps), name) for name, steps in passes.items())}


def schedule(name: str, stages: str, microbatches: str, split: str = "") -> "str | dict":
    """A pipeline's schedule with its bubble, as the command draws it."""
    options = ["--split"] if split else []
    said = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stdout(said), redirect_stderr(said), suppress(SystemExit):
        file = Path(folder) / "schedule.svg"
        command = [name, "--stages", stages, "--microbatches", microbatches, "--plot", str(file), *options]
        if show_schedule(command) == 0:
            first, *_, last = said.getvalue().strip().splitlines()
            return {"text": f"{first}\n{last}", "picture": file.read_text()}
    return said.getvalue().rpartition(": error: ")[2].strip()  # without the command's usage


def thresholds(chip: str, axes: str, F: str) -> str:
    """From which batch on strategies are bound by compute (Part 5)."""
    one, F_ = hardware.chip(chip), float(F)
    if one.kind == "gpu":
        reach = {"in a node": one.intensity("node"), "beyond it": one.intensity("scale-out")}
    else:
        C, W = one.flops("bf16"), one.bandwidth("ici", axes=int(axes))
        reach = {f"over {axes} axes of the torus": cost.data_threshold(C, W)}
    rows = [("a matmul, by HBM: tokens per replica of the weights", cost.critical_batch(one.flops("bf16"), one.hbm_bw))]
    for where, intensity in reach.items():
        rows.append((f"data parallelism, FSDP {where}: tokens per chip", intensity))
        rows.append((f"tensor parallelism {where}, F = {F_:,.0f}: at most, ways", F_ / intensity))
    return "\n".join(f"{what:72} {value:>10,.1f}" for what, value in rows)


def memory(model: str, mesh: str, zero: str = "3") -> str:
    """Return the bytes of params, gradients and Adam's state on each chip, and which chips hold them (Part 5).

    ShardingError, as of `scaling.show params`, if the model does not divide over the mesh.
    """
    params, sizes = num_params(configs.get(model)), parse_mesh(mesh)
    if strange := set(sizes) - set("XYZ"):
        raise ValueError(
            f"the mesh has {', '.join(sorted(strange))}\n  fix: here X shards by ZeRO, Y is tensor, Z pipeline"
        )
    leaf_rows(configs.get(model), sizes, "bf16", int(zero))
    held = cost.training_memory(params, X=sizes.get("X", 1), Y=sizes.get("Y", 1), Z=sizes.get("Z", 1), zero=int(zero))
    rows = [("params", params, "in all"), ("params", held.params, "bytes a chip"), ("gradients", held.grads, ""),
            ("Adam's state", held.optimizer, ""), ("together", held.total, "")]  # fmt: skip
    fits = [name for name in hardware.chips() if held.total <= hardware.chip(name).hbm_bytes]
    table = "\n".join(f"{what:14} {value:>22,.0f} {unit}" for what, value, unit in rows)
    return f"{table}\n" + fill(f"before activations it fits {', '.join(fits) or 'no chip of the table'}", 100)


def _types(line: str, count: int) -> tuple:
    """The operands of a line, so many, and its result."""
    read = parse_line(line)
    if len(read.operands) != count:
        what = "A[I, J] * B[J, K] -> C[I, K]" if count == 2 else "A[I_X] -> A[I]"
        raise ValueError(f"{line}\n  it has {len(read.operands)} operands in place of {count}\n  fix: write {what}")
    return *read.operands, read.result


def _sizes(text: str):
    return parse_sizes(text, "sizes", "dim") if text.strip() else None


def _priced(plan_of, types, mesh: str, sizes: str, chip: str) -> "str | dict":
    """A plan, the cheapest by a chip's time, with the bytes and microseconds of each step."""
    axes = parse_mesh(mesh)
    dims = {dim: DIM for one in types for dim in parse(one).dim_names} | dict(_sizes(sizes) or {})
    seconds = seconds_on(hardware.chip(chip), dims, axes)
    plan = plan_of(*types, sizes=dims, mesh=axes, cost=seconds)
    case = f"case {plan.case}\n" if getattr(plan, "case", None) else ""
    rows = [
        f"{step!s:64} {step.wire_bytes(dims, axes, 'bf16'):>14,.0f} bytes sent {1e6 * seconds(step):>10,.1f} us"
        for step in plan.steps
    ]
    together = sum(map(seconds, plan.steps))
    if not rows:
        return "nothing to do"
    text = case + "\n".join(rows) + f"\ntogether {1e6 * together:,.1f} us on {chip}, in bf16"
    return {"text": text, "picture": player(map(str, plan.steps))}


ASKED = MappingProxyType(
    {f.__name__: f for f in (check, devices, reshard, matmul, derive, schedule, thresholds, memory, exercise, run)}
)
