"""What the playground asks of the library: text in, text out, without torch. An illegal line is its own error."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import MappingProxyType

from scaling import algebra, configs, cost, hardware
from scaling.algebra.law import check_product
from scaling.algebra.rules import collective_steps
from scaling.check.lines import KINDS
from scaling.cost.step_time import seconds_on
from scaling.cost.transformer import num_params
from scaling.show import draw
from scaling.show.params import leaf_rows
from scaling.show.schedules import main as show_schedule
from scaling.spec import ShardingError, parse, parse_line
from scaling.spec.sizes import parse_mesh, parse_sizes

DIM = 4096  # of a dim whose size is not given


def answer(name: str, given: str) -> str:
    """What `name` answers to the fields of its form, given as JSON; what is refused answers with its error."""
    try:
        return ASKED[name](**json.loads(given))
    except (ShardingError, ValueError) as error:
        return str(error)


def check(call: str, line: str) -> str:
    """Whether a line is legal as such a call, and what it does to the axes."""
    if call == "einsum":
        check_product(line)
        return f"legal: {parse_line(line)}"
    steps = collective_steps(KINDS[call], line)
    does = [f"{KINDS[call]} over {', '.join(step.axes)}: {step.before} -> {step.after}" for step in steps]
    return "\n".join(["legal:", *does] if does else ["legal, and there is nothing to do"])


def devices(types: str, mesh: str, sizes: str = "") -> str:
    """Which device holds what."""
    return "\n\n".join(draw(one, parse_mesh(mesh), _sizes(sizes)) for one in types.split(";"))


def reshard(line: str, mesh: str, sizes: str, chip: str) -> str:
    """The cheapest way from a type to another, with what it sends and how long it takes."""
    return _priced(algebra.reshard, _types(line, 1), mesh, sizes, chip)


def matmul(line: str, mesh: str, sizes: str, chip: str) -> str:
    """The cheapest way to a product, which may need collectives, and its case."""
    return _priced(algebra.matmul, _types(line, 2), mesh, sizes, chip)


def derive(line: str) -> str:
    """The listing of a chain of products, forward and backward, as the book writes it."""
    return str(algebra.derive(line))


def schedule(name: str, stages: str, microbatches: str, split: str = "") -> str:
    """Return a pipeline's schedule as text, with its bubble."""
    options = ["--split"] if split else []
    command = [name, "--stages", stages, "--microbatches", microbatches, "--width", "96", "--no-colour", *options]
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), suppress(SystemExit):
        show_schedule(command)
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
    return f"{table}\nfits, before activations: {', '.join(fits) or 'no chip of the table'}"


def _types(line: str, count: int) -> tuple:
    """The operands of a line, so many, and its result."""
    read = parse_line(line)
    if len(read.operands) != count:
        what = "A[I, J] * B[J, K] -> C[I, K]" if count == 2 else "A[I_X] -> A[I]"
        raise ValueError(f"{line}\n  it has {len(read.operands)} operands in place of {count}\n  fix: write {what}")
    return *read.operands, read.result


def _sizes(text: str):
    return parse_sizes(text, "sizes", "dim") if text.strip() else None


def _priced(plan_of, types, mesh: str, sizes: str, chip: str) -> str:
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
    return case + "\n".join(rows or ["nothing to do"]) + f"\ntogether {1e6 * together:,.1f} us on {chip}, in bf16"


ASKED = MappingProxyType(
    {f.__name__: f for f in (check, devices, reshard, matmul, derive, schedule, thresholds, memory)}
)
