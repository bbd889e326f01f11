"""Part 3, "Sharded Matrices and How to Multiply Them": https://jax-ml.github.io/scaling-book/sharding

The notation with its pictures, the four cases of a sharded product (planned, run on ranks, compared with one device),
a whole algorithm derived from one line, and the pop quizzes and questions: the book's answers beside ours.

    python chapters/03_sharding.py                       torchrun --nproc-per-node 4 chapters/03_sharding.py
    python chapters/03_sharding.py --mesh X=4,Y=2 --plot nine.svg
"""

# %%
import argparse
import sys

import torch

from scaling import cost, launch, show
from scaling.algebra import derive, matmul, matmul_via, reshard
from scaling.book.answers import Answer, report
from scaling.book.lesson import EXACT, Report
from scaling.collectives import rings, run, run_program, shard, unshard
from scaling.cost.step_time import seconds_on
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.trace.peak import peak_memory

V4P, V5E, V5P = (chip(name) for name in ("v4p", "v5e", "v5p"))
MICRO = 1e6  # microseconds in a second

# %% A unified notation for sharding: which device holds what


def pictures(report_, args):
    report_.title("The book's nine shardings of a matrix over 2 x 2 devices")
    mesh = {"X": 2, "Y": 2}
    for row in range(0, 9, 3):
        report_.say(
            show.beside([show.draw(spec, mesh, colour=args.colour) for spec in show.NINE[row : row + 3]]) + "\n"
        )
    if args.plot and report_.mesh.rank == 0:
        show.save(args.plot, show.NINE, mesh)
        report_.say(f"wrote {args.plot}")


# %% How do we describe this in code? Local shapes, and the four cases, each planned, run and compared

SIZES = {"I": 8, "J": 16, "K": 32}
CASES = [
    ("A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]"),
    ("A[I, J_X]", "B[J, K]", "C[I, K]"),
    ("A[I, J_X]", "B[J_X, K]", "C[I, K]"),
    ("A[I, J_X]", "B[J_X, K]", "C[I, K_X]"),
    ("A[I_X, J]", "B[J, K_X]", "C[I_X, K]"),
    ("A[I_X, J]", "B[J, K_X]", "C[I, K_X]"),
    ("A[I_X, J_Y]", "B[J_Y, K_X]", "C[I_X, K]"),
    ("A[I_XY, J]", "B[J_Y, K]", "C[I, K_YX]"),
]


def dense(seed):
    rng, (I, J, K) = torch.Generator().manual_seed(seed), SIZES.values()
    A, B = (torch.randn(shape, dtype=torch.float64, generator=rng) for shape in ((I, J), (J, K)))
    return A, B, A @ B


def four_cases(report_, mesh, seed):
    report_.title("Four cases: what is sent depends on the shardings alone")
    A, B, C = (array.to(mesh.device) for array in dense(seed))
    compared = []
    for a, b, out in CASES:
        plan = matmul(a, b, out, mesh=mesh)
        got = run(plan, shard(a, A, mesh), shard(b, B, mesh), mesh)
        which = " and ".join(map(str, plan.cases))
        sent = plan.wire_bytes(SIZES, mesh, torch.float64)
        report_.say(f"{a} * {b} -> {out}: case {which}, {sent:,.0f} bytes sent by each device\n{plan}\n")
        compared.append((f"case {which}: {a} * {b} -> {out}", unshard(out, got, mesh), C, EXACT))
    for src, dst in [("A[I_XY, J]", "A[I_X, J]"), ("A[I_XY, J]", "A[I_Y, J]"), ("A[I_X, J]", "A[I, J_X]")]:
        plan = reshard(src, dst, SIZES, mesh)
        report_.say(f"{src} -> {dst}\n{plan}\n")
        compared.append((f"reshard {src} -> {dst}", unshard(dst, run(plan, shard(src, A, mesh), mesh), mesh), A, EXACT))
    report_.equal(compared)


# %% What follows from one line: FSDP + tensor parallelism, forward and backward

LINE = "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]"


def derived(report_, mesh, seed):
    report_.title("Derived from its types: FSDP + tensor parallelism")
    program, sizes = derive(LINE), {"B": 16, "D": 16, "F": 32}
    report_.say(str(program) + "\n")
    rng = torch.Generator().manual_seed(seed)
    types = [*program.operands, program.out.with_name("dOut")]
    whole = [torch.randn(t.global_shape(sizes), dtype=torch.float64, generator=rng).to(mesh.device) for t in types]
    inputs = {t.name: shard(str(t), x, mesh) for t, x in zip(types, whole, strict=True)}
    Out, grads = run_program(program, inputs, inputs.pop("dOut"), mesh)
    leaves = [x.clone().requires_grad_() for x in whole[:-1]]
    one = leaves[0] @ leaves[1] @ leaves[2]
    gradients = torch.autograd.grad(one, leaves, whole[-1])
    rows = [("Out", unshard(str(program.out), Out, mesh), one.detach(), EXACT)]
    for t, wanted in zip(program.operands, gradients, strict=True):
        rows.append((f"d{t.name}", unshard(str(t), grads[t.name], mesh), wanted, EXACT))
    report_.equal(rows)


# %% The same on 8,192 devices, without any: types and sizes suffice for bytes, FLOPs and memory, line by line


def abstract(report_):
    report_.title("One layer of LLaMA-3 70B's MLPs, 1M tokens, on an abstract mesh of 1024 x 8, one device's share")
    sizes, mesh = {"B": 1 << 20, "D": 8192, "F": 28672}, AbstractMesh({"X": 1024, "Y": 8})
    B, D, F, X, Y = *sizes.values(), *mesh.sizes.values()
    program = derive(LINE, keep_gathered=True)

    def empty(spec):
        return torch.empty(spec.local_shape(sizes, mesh), dtype=torch.bfloat16, device="meta")

    inputs = {spec.name: empty(spec) for spec in program.operands}
    with peak_memory() as memory:
        run_program(program, inputs, empty(program.out), mesh)
    lines = [(str(e), f"{e.nbytes:,}", f"{e.flops:,}", f"{now / 1e6:,.1f}") for e, now, _ in memory.steps]
    report_.table(lines, ["line", "V bytes", "FLOPs", "MB after it"], colalign=("left", *["right"] * 3))
    report_.say(f"peak {memory.peak / 1e6:,.1f} MB\n")
    moved = sum(e.nbytes for e, _, _ in memory.steps if e.wire_bytes)
    flops = sum(e.flops for e, _, _ in memory.steps)
    rows = [
        ("bytes of all collectives", "8BD/X + 12DF/Y", 8 * B * D // X + 12 * D * F // Y, moved),
        ("FLOPs", "12BDF/(XY)", 12 * B * D * F // (X * Y), flops),
    ]
    report_.same(rows, ["both passes", "formula", "value", "counted"])


# %% Pop quizzes, and Questions 1 to 7, 9 and 10 (8 is chapters/03_collectives.py)


def quizzes():
    A = parse("A[I_XY, J]")
    local = A.nbytes({"I": 1024, "J": 4096}, {"X": 8, "Y": 2}, "fp32")
    mesh, sizes = {"X": 2, "Y": 8, "Z": 2}, {"I": 128, "J": 2048}
    V = parse("A[E, F]").nbytes({"E": 2048, "F": 8192}, {}, "bf16")
    return [
        Answer("Quiz 1: bytes per device", "1048576", local, "bytes"),
        Answer("Quiz 1: to load from an H100's HBM", "294", local / 3.4e12 * 1e9, "ns", erratum="1 MiB, not 1e6 bytes"),
        Answer("Quiz 2: bytes per device", "16384", A.nbytes(sizes, mesh, "int8"), "bytes"),
        Answer("Quiz 2: bytes in all", "524288", A.total_nbytes(sizes, mesh, "int8"), "bytes"),
        Answer("Quiz 3: AllGather, were it a ring", "377", cost.all_gather(V, V5E, 4, wrap=True) * MICRO, "us",
               erratum="V is 33.55e6, not 34e6 bytes"),
        Answer("Quiz 3: AllGather on a line of 4", "560", cost.all_gather(V, V5E, 4) * MICRO, "us"),
        Answer("Quiz 3: E = F = 256", "3", cost.all_gather(2 * 256 * 256, V5E, 4) * MICRO, "us"),
    ]  # fmt: skip


def question_2():
    mesh, sizes = {"X": 4, "Y": 4, "Z": 4}, {"B": 1024, "D": 4096}
    local = parse("A[B_X, D_Y]").nbytes(sizes, mesh, "bf16")
    times = {
        "AG_X": cost.all_gather(4 * local, V4P, 4),
        "AG_XY": cost.all_gather(16 * local, V4P, (4, 4)),
        "AR_Z": cost.all_reduce(local, V4P, 4),
        "idle": cost.all_gather(16 * local, V4P, (4, 4, 4)),
    }
    clever = reshard("A[B_X, D_Y]", "A[B, D_Y]", sizes, mesh, cost=seconds_on(V4P, sizes, mesh, flops=False))
    planned = sum(map(seconds_on(V4P, sizes, mesh, flops=False), clever.steps))
    return [
        Answer("2.1 AllGather_X([B_X, D_Y])", "23", times["AG_X"] * MICRO, "us"),
        Answer("2.2 AllGather_XY([B_X, D_Y])", "46", times["AG_XY"] * MICRO, "us"),
        Answer("2.3 AllReduce_Z([B_X, D_Y] {U_Z})", "11.6", times["AR_Z"] * MICRO, "us"),
        Answer("2.1 with idle Z: the plan's time", "11.5", planned * MICRO, "us", erratum="half of 23.3, not of 23"),
        Answer("2.1 with idle Z: the plan", "", " then ".join(s.op for s in clever.steps), note=str(clever.steps[0])),
        Answer("2.2 with idle Z", "31", times["idle"] * MICRO, "us"),
    ]  # fmt: skip


def question_4():
    mesh, D, F = {"X": 4}, 8192, 32768
    line = ("X[B, D]", "Y[D_X, F]", "Z[B, F]")
    gather = matmul_via(*line, "X[B, D]", "Y[D, F]")
    reduce = matmul_via(*line, "X[B, D_X]", "Y[D_X, F]")

    def moved(plan, B):
        return plan.gather_bytes({"B": B, "D": D, "F": F}, mesh, "bf16")

    turn = next(B for B in range(64, D, 64) if moved(reduce, B) >= moved(gather, B))
    best = matmul(*line, {"B": 128, "D": D, "F": F}, mesh)
    C_W = V5P.flops("bf16") / V5P.ici_bw
    return [
        Answer("4 bytes of strategy 1, B = 128: 2DF", "536870912", moved(gather, 128), "bytes"),
        Answer("4 bytes of strategy 2, B = 128: 4BF", "16777216", moved(reduce, 128), "bytes"),
        Answer("4 strategy 2 is better up to B = D/2 =", "4096", turn, "tokens"),
        Answer("4 strategy 1 is compute-bound from B =", "2550", C_W, "tokens"),
        Answer("4 the plan's choice at B = 128", "AllReduce", best.collectives[0].op),
    ]


def question_5():
    sizes, mesh = {"I": 8192, "J": 8192, "K": 8192}, {"X": 4, "Y": 4, "Z": 4}
    times, whole = [], ("A[I, J]", "B[J, K]")
    for a, b in (("A[I_XYZ, J]", whole[1]), (whole[0], "B[J, K_XYZ]"), ("A[I, J_XYZ]", "B[J_XYZ, K]"), whole):
        plan = matmul_via(a, b, "C[I, K]", a, b)
        times.append(sum(map(seconds_on(V4P, sizes, mesh), plan.steps)))
    best = " = ".join(f"({n})" for n, t in enumerate(times, 1) if t == min(times))
    text = ", ".join(f"({n}) {t * 1e3:.2f} ms" for n, t in enumerate(times, 1))
    return [Answer("5 the fastest of the four, I = J = K = 8192", "(1) = (2)", best, note=text)]


def question_6():
    mesh, sizes = {"X": 4, "Y": 4}, {"I": 2**14, "J": 2**14, "K": 2**14}
    rows = []
    for part, a, b, out, dim in [
        ("6", "A[I_X, J_Y]", "B[J_Y, K]", "C[I_X, K]", "J"),
        ("6b", "A[I_X, J]", "B[J_X, K_Y]", "C[I_X, K_Y]", "I"),
        ("6c", "A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]", ""),
    ]:
        plan = matmul(a, b, out, mesh=mesh)
        what = ", ".join(f"{s.op}_{''.join(s.axes)}({s.before.name})" for s in plan.collectives) or "nothing"
        comms = sum(map(seconds_on(V5E, sizes, mesh, flops=False), plan.steps))
        math = plan.flops(sizes, mesh) / V5E.flops("bf16")
        rows.append(Answer(f"{part} {a} * {b}: sent", "", what, note="on lines of 4: v5e wraps round at 16 only"))
        if dim:
            turn, note = comms / math * sizes[dim], f"where 2IJK/(16 C) equals the {plan.collectives[0].op}'s time"
            rows.append(Answer(f"{part} compute-bound from {dim} =", "", turn, note=note))
    return rows


def question_7():
    sizes, mesh = {"B": 128, "D": 8192, "F": 32768}, {"X": 2, "Y": 2}
    lines = {
        "FSDP": "In[B_X, D] * W_in[D_XY, F] * W_out[F, D_XY] -> Out[B_X, D]",
        "TP": "In[B, D_XY] * W_in[D, F_XY] * W_out[F_XY, D] -> Out[B, D_XY]",
    }
    times, held = {}, {}
    for name, line in lines.items():
        program = derive(line)
        times[name] = sum(map(seconds_on(V5E, sizes, mesh, flops=False), program.forward))
        products = [step for step in program.forward if step.op == "Einsum"]
        held[name] = max(step.before[1].nbytes(sizes, mesh, "bf16") for step in products)
    math = derive(lines["TP"]).flops(sizes, mesh) / 3 / V5E.flops("bf16")
    return [
        Answer("7 bytes of one weight", "536e6", parse("W[D, F]").nbytes(sizes, {}, "bf16"), "bytes"),
        Answer("7 bytes of In", "2e6", parse("In[B, D]").nbytes(sizes, {}, "bf16"), "bytes"),
        Answer("7 the better one", "TP", min(times, key=times.get)),
        Answer("7 most of one weight on a chip, FSDP", "", held["FSDP"] / 1e6, "MB", note="gathered: over 300 MB"),
        Answer("7 one weight on a chip, TP", "", held["TP"] / 1e6, "MB", note="stays a quarter"),
        Answer("7 comms, FSDP", "", times["FSDP"] * 1e3, "ms", note="gathers both weights"),
        Answer("7 comms, TP", "", times["TP"] * MICRO, "us", note="AllGather In, ReduceScatter Out"),
        Answer("7 FLOPs", "", math * MICRO, "us", note="4BDF / 4 chips; reading the weights from HBM takes longer"),
    ]


def questions_9_and_10():
    sizes, mesh = {"N": 64, "M": 512, "K": 128}, {"X": 4}
    gather = matmul_via("A[N, M_X]", "B[M, K]", "C[N, K]", "A[N, M]", "B[M, K]")
    scatter = matmul_via("A[N, M_X]", "B[M, K]", "C[N_X, K]", "A[N, M_X]", "B[M_X, K]")
    ratio = gather.gather_bytes(sizes, mesh, 2) / scatter.gather_bytes(sizes, mesh, 2)
    D, N = 16, 64
    counted = {(name, ways): count for name, ways, _, count in rings.counts(D, N * N // D)}
    scale = N * N  # of a matrix of N^2 scalars
    return [
        Answer("9.3 bytes gathered / scattered, M/K = 512/128", "4", ratio),
        Answer("10.1 AllGather, one way, D = 16: N^2 (1 - 1/D)", "0.9375", counted["AllGather", 1] / scale, "N^2"),
        Answer("10.2 AllToAll, one way: N^2/2 (1 - 1/D)", "0.46875", counted["AllToAll", 1] / scale, "N^2"),
        Answer("10.3 ratio, one way", "0.5", counted["AllToAll", 1] / counted["AllGather", 1]),
        Answer("10.4 AllGather, both ways", "0.5", counted["AllGather", 2] / scale, "N^2", note="floor(D/2) hops"),
        Answer("10.5 AllToAll, both ways: N^2/8", "0.125", counted["AllToAll", 2] / scale, "N^2"),
        Answer("10.6 ratio, both ways", "0.25", counted["AllToAll", 2] / counted["AllGather", 2]),
    ]


def answers() -> list[Answer]:
    A, mesh = parse("A[I_X, J, K]"), AbstractMesh({"X": 4, "Y": 8, "Z": 2})
    sizes = {"I": 8, "J": 8, "K": 8}
    first = Answer("1 bytes in all / bytes of one copy", "16", A.total_nbytes(sizes, mesh, 2) / (8**3 * 2))
    third = Answer("3 AllGather_X([B_X]), B = 128", "2", cost.all_gather(256, V4P, 4) * MICRO, "us")
    rest = question_4() + question_5() + question_6() + question_7() + questions_9_and_10()
    return [*quizzes(), first, *question_2(), third, *rest]


def main(mesh, args) -> int:
    report_ = Report(mesh)
    pictures(report_, args)
    four_cases(report_, mesh, args.seed)
    derived(report_, mesh, args.seed)
    abstract(report_)
    report_.title("Pop quizzes and questions")
    wrong = report(answers()) if mesh.rank == 0 else 0
    return len(report_.done()) + wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default=None, help="axes X and Y and their sizes (default X=2,Y=2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--colour", "--color", action=argparse.BooleanOptionalAction, default=sys.stdout.isatty())
    parser.add_argument("--plot", default="", metavar="FILE", help="also write the nine shardings as PNG or SVG")
    options = parser.parse_args()
    sizes = launch.parse_mesh(options.mesh) if options.mesh else launch.fit({"X": 2, "Y": 2})
    sizes |= {axis: 1 for axis in "XY" if axis not in sizes}
    sys.exit(1 if launch.start(main, sizes, options, device=options.device) else 0)
