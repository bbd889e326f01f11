"""Algorithms derived from one-line types: the book's listings, their costs, and their numbers against one device; and
the listings of Part 5 in the library and in the chapters: each numbered step once, in the book's order."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from array_types import equation_of, execute, gather, scatter
from refused import evaluated, refused

from scaling.algebra import derive
from scaling.collectives import run_program, shard
from scaling.models.pointwise import act
from scaling.spec import ShardingError, Spec, parse
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace

DP = "In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]"
FSDP = "In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]"
TP = "In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]"
FSDP_TP = "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]"
STRATEGIES = {DP: data_parallel, FSDP: fsdp, TP: tensor_parallel, FSDP_TP: fsdp_tp}
CHAPTERS = {DP: "05_dp", FSDP: "05_fsdp", TP: "05_tp", FSDP_TP: "05_fsdp_tp"}

XYZ = {"X": 2, "Y": 2, "Z": 2}
MOVES = {  # what a forward pass sends
    # Part 3, Question 7: gather In over YZ, reduce Tmp over X, scatter Out over YZ
    "In[B, D_XYZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B, D_XYZ]": (
        "AllGather_YZ In[B, D_X]; AllReduce_X Tmp[B, F_YZ]; ReduceScatter_YZ Out[B, D_XYZ]"
    ),
    # Part 5, with FSDP or tensor parallelism over two axes
    "In[B_XZ, D_Y] * W_in[D_XZ, F_Y] * W_out[F_Y, D_XZ] -> Out[B_XZ, D_Y]": """
        AllGather_Y In[B_XZ, D]; AllGather_XZ W_in[D, F_Y]; AllGather_XZ W_out[F_Y, D];
        ReduceScatter_Y Out[B_XZ, D_Y]""",
    "In[B_X, D_YZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B_X, D_YZ]": """
        AllGather_YZ In[B_X, D]; AllGather_X W_in[D, F_YZ]; AllGather_X W_out[F_YZ, D];
        ReduceScatter_YZ Out[B_X, D_YZ]""",
    # to where the next weight is split
    "In[B, D_X] * W_in[D_X, F] * W_out[F_X, D] -> Out[B, D]": "ReduceScatter_X Tmp[B, F_X]; AllReduce_X Out[B, D]",
}
LINES = {  # what nobody wrote by hand: a mesh
    DP: {"X": 2},
    FSDP_TP: {"X": 2, "Y": 2},
    **dict.fromkeys(MOVES, XYZ),
    "In[B_X, D] * W_in[D_XZ, F_Y] * W_out[F_Y, D_XZ] -> Out[B_X, D]": XYZ,
    "In[B_X, D] * W_1[D, F_Y] * W_2[F_Y, G] * W_3[G_Y, D] -> Out[B_X, D]": {"X": 2, "Y": 2},
    "Q[B_X, T, N_Y, H] * K[B_X, S, N_Y, H] -> Att[B_X, N_Y, T, S]": {"X": 2, "Y": 2},
    "O[B_X, T, N_Y, H] * W_O[N_Y, H, D] -> Out[B_X, T, D_Y]": {"X": 2, "Y": 2},
    "Q[B, T_X, N, H] * K[B, S_X, N, H] -> Att[B, N, T_X, S]": {"X": 4},
    "Q[B_X, T, H] *_H K[B_X, S, H] *_S V[B_X, S, H] -> O[B_X, T, H]": {"X": 2},
    # the result, or an argument, is a partial sum: its cotangent is replicated
    "In[B, D_X] * W[D_X, F] -> Out[B, F] {U_X}": {"X": 2, "Y": 2},
    "In[B, D] * W[D, F_Y] -> Out[B, F_Y] {U_X}": {"X": 2, "Y": 2},
    "In[B_X, D_Y] * W_in[D_Y, F] * W_out[F_Y, D] -> Out[B_X, D] {U_Y}": {"X": 2, "Y": 2},
    "In[B, D] {U_X} * W[D, F_Y] -> Out[B, F_Y] {U_X}": {"X": 2, "Y": 2},
    "In[B, D_Y] {U_X} * W[D_Y, F] -> Out[B_X, F]": {"X": 2, "Y": 2},
}
SIZES = {"B": 8, "D": 16, "F": 8, "G": 4, "T": 4, "S": 8, "N": 4, "H": 2}

# Part 5, the algorithm of each section: op and result of every numbered line
BOOK = {
    DP: """
        Einsum Tmp[B_X, F]; Einsum Out[B_X, D]; Loss Loss[B_X] |
        Cotangent dOut[B_X, D]; Einsum dW_out[F, D] {U_X}; AllReduce_X dW_out[F, D] async; Einsum dTmp[B_X, F];
        Einsum dW_in[D, F] {U_X}; AllReduce_X dW_in[D, F] async; Einsum dIn[B_X, D]""",
    FSDP: """
        AllGather_X W_in[D, F] ahead; Einsum Tmp[B_X, F]; AllGather_X W_out[F, D] ahead; Einsum Out[B_X, D];
        Loss Loss[B_X] |
        Cotangent dOut[B_X, D]; Einsum dW_out[F, D] {U_X}; ReduceScatter_X dW_out[F, D_X] async;
        AllGather_X W_out[F, D] ahead; Einsum dTmp[B_X, F]; Einsum dW_in[D, F] {U_X};
        ReduceScatter_X dW_in[D_X, F] async; AllGather_X W_in[D, F] ahead; Einsum dIn[B_X, D]""",
    TP: """
        AllGather_Y In[B, D] critical; Einsum Tmp[B, F_Y]; Einsum Out[B, D] {U_Y}; ReduceScatter_Y Out[B, D_Y] critical;
        Loss Loss[B] |
        Cotangent dOut[B, D_Y]; AllGather_Y dOut[B, D] critical; Einsum dW_out[F_Y, D]; Einsum dTmp[B, F_Y];
        AllGather_Y In[B, D] ahead; Einsum dW_in[D, F_Y]; Einsum dIn[B, D] {U_Y};
        ReduceScatter_Y dIn[B, D_Y] critical""",
    FSDP_TP: """
        AllGather_Y In[B_X, D] critical; AllGather_X W_in[D, F_Y] ahead; Einsum Tmp[B_X, F_Y];
        AllGather_X W_out[F_Y, D] ahead; Einsum Out[B_X, D] {U_Y}; ReduceScatter_Y Out[B_X, D_Y] critical;
        Loss Loss[B_X] |
        Cotangent dOut[B_X, D_Y]; AllGather_Y dOut[B_X, D] critical; Einsum dW_out[F_Y, D] {U_X};
        ReduceScatter_X dW_out[F_Y, D_X] async; AllGather_X W_out[F_Y, D] ahead; Einsum dTmp[B_X, F_Y];
        AllGather_Y In[B_X, D] ahead; Einsum dW_in[D, F_Y] {U_X}; ReduceScatter_X dW_in[D_X, F_Y] async;
        AllGather_X W_in[D, F_Y] ahead; Einsum dIn[B_X, D] {U_Y}; ReduceScatter_Y dIn[B_X, D_Y] critical""",
}


def entries(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(";")]


def listing(steps) -> list[str]:
    return [
        f"{step.op}_{''.join(step.axes)} {step.after} {step.when}" if step.axes else f"{step.op} {step.after}"
        for step in steps
    ]


@pytest.mark.parametrize("line", BOOK)
@pytest.mark.parametrize("sizes", [None, {"X": 2, "Y": 2}, {"X": 1024, "Y": 8}])
def test_the_books_listings(line, sizes):
    program = derive(line, mesh=sizes)
    for steps, text in zip((program.forward, program.backward), BOOK[line].split("|"), strict=True):
        assert listing(steps) == entries(text)


ROOT = Path(__file__).parents[2]
STEP = re.compile(r'\b(\w+)\("[^"]* -> (\w+\[[^"]*)".*\)  # (\d+)\.(?:, in the backward (\d+)\.)?')


def numbered(line: str) -> list[tuple[str, int, str, str]]:
    """[(pass, number, function, the type that it leaves)] of the book. Past the activation, which the book leaves out,
    its dTmp is dAct; steps about the loss belong to no layer."""
    found = []
    for where, steps in zip(("forward", "backward"), BOOK[line].split("|"), strict=True):
        for number, entry in enumerate(entries(steps.replace("dTmp", "dAct")), 1):
            op, result = re.match(r"(\w+?)(?:_[XY])? (.*?)(?: async| ahead| critical)?$", entry).groups()
            found.append((where, number, re.sub(r"\B(?=[A-Z])", "_", op).lower(), result))
    return [each for each in found if each[2] not in ("loss", "cotangent")]


@pytest.mark.parametrize("line", BOOK)
@pytest.mark.parametrize("chapter", [False, True], ids=["library", "chapter"])
def test_a_listing_by_hand_has_each_step_of_the_book_once_and_in_its_order(line, chapter):
    """What both passes do stands once, with its number in either."""
    file, found = ROOT / f"chapters/{CHAPTERS[line]}.py" if chapter else Path(STRATEGIES[line].__file__), []
    for name, body in re.findall(r"^def (\w+)(.*?)(?=^\S|\Z)", file.read_text(), re.M | re.S):
        where = {"gather": "forward", "reduce": "backward"}.get(name, name.removeprefix("layer_"))
        lines = STEP.findall(body)
        numbers = [int(number) for *_, number, _ in lines]
        assert numbers == sorted(numbers), name
        found += [(where, int(number), op, result) for op, result, number, _ in lines]
        found += [("backward", int(late), op, result) for op, result, _, late in lines if late]
    assert sorted(found) == sorted(numbered(line))


def test_printed_as_the_book_numbers_it():
    program = derive(FSDP_TP)
    text = str(program)
    assert "  6. Out[B_X, D_Y] = ReduceScatter_Y(Out[B_X, D] {U_Y})  (on the critical path)" in text
    assert "  7. Loss[B_X] = ..." in text
    assert "  8. dW_in[D, F_Y] {U_X} = In[B_X, D] *_B dTmp[B_X, F_Y]" in text
    assert "to compute dW_out[F_Y, D_X], dW_in[D_X, F_Y], dIn[B_X, D_Y]" in text
    assert (program.note, str(replace(program, note="so"))) == ("", f"{text}\n(so)")
    named = derive("Q[B, T, H] *_H K[B, S, H] *_S V[B, S, H] -> O[B, T, H]").forward  # what each product contracts
    assert [str(step) for step in named[:2]] == [
        "Tmp[B, T, S] = Q[B, T, H] *_H K[B, S, H]",
        "O[B, T, H] = Tmp[B, T, S] *_S V[B, S, H]",
    ]


def test_kept_gathers_are_not_repeated():
    programs = [derive(FSDP_TP, keep_gathered=kept) for kept in (False, True, ("In", "W_in", "W_out"))]
    assert [len(program.backward) for program in programs] == [12, 11, 9]
    assert [parse("In[B_X, D]") in program.saved for program in programs] == [False, True, True]


B, D, F, X, Y = 4096, 1024, 8192, 4, 8


@pytest.mark.parametrize(
    ("line", "devices", "forward", "both"),
    [
        (DP, X, 0, 8 * D * F),
        (FSDP, X, 4 * D * F, 12 * D * F),
        (TP, Y, 4 * B * D, 8 * B * D),
        (FSDP_TP, X * Y, 4 * B * D // X + 4 * D * F // Y, 8 * B * D // X + 12 * D * F // Y),
    ],
)
def test_bytes_are_the_books_ledger(line, devices, forward, both):
    """Part 5, Takeaways, bf16, with In kept; and FLOPs, 4 BDF forward and 8 BDF backward over all devices."""
    sizes, mesh = {"B": B, "D": D, "F": F}, {"X": X, "Y": Y}
    program = derive(line, keep_gathered=True)
    assert sum(step.gather_bytes(sizes, mesh, "bf16") for step in program.forward) == forward
    assert program.gather_bytes(sizes, mesh, "bf16") == both
    assert program.flops(sizes, mesh) * devices == 12 * B * D * F


def collectives_of(events):
    return Counter((e.op, e.axes, e.before.dims, e.before.unreduced, e.after.dims, e.after.unreduced) for e in events)


def problem(program):
    """Each operand by its type, a cotangent of the result, and the dense chain's result; the operands have their
    gradients."""
    gen = torch.Generator().manual_seed(0)
    whole = {
        spec: torch.randn(spec.global_shape(SIZES), dtype=torch.float64, generator=gen).requires_grad_()
        for spec in program.operands
    }
    products = [step for step in program.forward if step.op == "Einsum"]
    out = whole[program.operands[0]]
    for step, spec in zip(products, program.operands[1:], strict=True):
        out = torch.einsum(equation_of(*step.before, step.after), out, whole[spec])
    dOut = torch.randn(out.shape, dtype=torch.float64, generator=gen)
    out.backward(dOut)
    return whole, dOut, out.detach()


@pytest.mark.parametrize(
    ("mesh", "line"), [({"X": 2}, DP), ({"X": 2}, FSDP), ({"Y": 2}, TP), ({"X": 2, "Y": 2}, FSDP_TP)]
)
def test_equal_to_the_strategy_written_by_hand(mesh, line):
    """One layer by hand and derived: equal in numbers, and in the collectives' number, axes, types and bytes."""
    strategy, program = STRATEGIES[line], derive(line, keep_gathered=True)
    whole, dOut, _ = problem(program)
    local = {spec.name: shard(str(spec), array.detach(), mesh) for spec, array in whole.items()}
    dOut = shard(str(program.out.with_name("dOut")), dOut, mesh)
    params = {name: local[name][None] for name in ("W_in", "W_out")}
    with trace() as by_hand:
        Out, saved = strategy.forward(params, local["In"], mesh, activation="gelu")
        dIn, grads = strategy.backward(dOut, saved, params, mesh)
    with trace() as derived:
        mine, cotangents = run_program(program, local, dOut, mesh, activation=lambda x: act(x, "gelu"))
    wanted = {"In": dIn} | {name: grad[0] for name, grad in grads.items()}
    torch.testing.assert_close((mine, cotangents), (Out, wanted), rtol=0, atol=1e-12)
    assert collectives_of(derived.collectives()) == collectives_of(by_hand.collectives())
    assert by_hand.book_bytes == derived.book_bytes == program.gather_bytes(SIZES, mesh, torch.float64)
    assert derived.flops == by_hand.flops


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("chosen", ["by rule", "by bytes"])
def test_derived_algorithms_compute_the_product_and_its_gradients(line, chosen):
    """On simulated devices, against autograd of the dense chain."""
    mesh = LINES[line]
    program = derive(line, mesh=mesh, sizes=SIZES if chosen == "by bytes" else None)
    whole, dOut, out = problem(program)
    held = {spec: scatter(spec, array.detach(), mesh) for spec, array in whole.items()}
    held = execute([step for step in program.forward if step.op != "Loss"], held, mesh)
    assert (gather(program.out, held[program.out], out.shape, mesh) - out).abs().max() < 1e-10
    held = {spec: held[spec] for spec in program.saved}
    # the law of cotangents: each term of a sum has the gradient of the sum, so nothing is reduced over its axis
    assert program.backward[0].after == Spec("d" + program.out.name, program.out.dims)
    held[program.backward[0].after] = scatter(program.backward[0].after, dOut, mesh)
    held = execute(program.backward[1:], held, mesh)
    for spec, array in whole.items():
        grad = Spec("d" + spec.name, spec.dims)
        assert (gather(grad, held[grad], array.shape, mesh) - array.grad).abs().max() < 1e-10, str(program)


@pytest.mark.parametrize("line", MOVES)
def test_what_a_forward_moves(line):
    found = [text.rpartition(" ")[0] for text in listing(derive(line).forward) if "_" in text.split()[0]]
    assert found == entries(MOVES[line])


REFUSED = """
call                                                     words of its error
derive('In[B, D] -> Out[B, D]')                          two operands
derive('In[B, D] * In[D, F] -> Out[B, F]')               name of its own
derive('In[B, D] * W[D, F] -> Out[B, G]')                in no operand
derive('In[B, D] * W[E, F] * V[F, D] -> Out[B, D]')      no dim to contract
derive('In[B, D] *_D W[D, F] *_D V[F, D] -> Out[B, F]')  meets no other
derive(FSDP_TP, keep_gathered=['Wout'])                  not an operand
"""
test_refused = refused(evaluated(REFUSED, globals()), ShardingError)
