"""A parallel algorithm from its one-line type: `derive("In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]")`.

The forward pass is the cheapest plan of the chain of products. The backward pass is its transpose, line by line from
the last to the first (Part 5, Appendix A), and follows the law of cotangents. A product takes the cotangent of its
result replicated if the result was unreduced. Its own results are unreduced wherever an operand was replicated over an
axis that splits the rest. The cotangent of an argument ends typed as the argument, or replicated if the argument is
unreduced.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache

from scaling.algebra.law import product_type
from scaling.algebra.products import Product, known_sizes, product_chain, resharder
from scaling.algebra.rules import parse_plain
from scaling.algebra.steps import COLLECTIVES, Counted, Step
from scaling.spec import ShardingError, Spec, mesh_sizes, parse_line

REMARKS = {"critical": "on the critical path", "ahead": "can be done ahead of time", "async": "off the critical path"}


@dataclass(frozen=True)
class Program(Counted):
    """A derived algorithm, whose str() is the book's listing.

    Attributes:
        operands: the arguments' types; the first argument flows from layer to layer.
        out: the result's type.
        forward: the lines of the forward pass, each with its types.
        backward: the lines of the backward pass.
        saved: the types that the forward pass saves for backward.
        hidden: the types of the arrays between two products, on which a nonlinearity may act.
        note: the note of Plan.
    """

    operands: tuple[Spec, ...]
    out: Spec
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[Spec, ...]
    hidden: tuple[Spec, ...]
    note: str = field(default="", compare=False)

    def __str__(self) -> str:
        loss = next(step.after for step in self.forward if step.op == "Loss")
        grads = [spec.cotangent() for spec in (*self.operands[:0:-1], self.operands[0])]
        lines = [" * ".join(map(str, self.operands)) + f" -> {self.out}", "", f"Forward: to compute {loss}"]
        lines += _numbered(self.forward)
        lines += ["", "Backward: to compute " + ", ".join(map(str, grads)), *_numbered(self.backward)]
        return "\n".join(lines + ([f"({self.note})"] if self.note else []))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The lines of both passes, in order."""
        return self.forward + self.backward


def _numbered(steps) -> list[str]:
    lines = []
    for number, step in enumerate(steps, 1):
        remark = REMARKS.get(step.when, "") if step.op in COLLECTIVES else ""
        lines.append(f"{number:3}. {step}" + (f"  ({remark})" if remark else ""))
    return lines


def derive(line, keep_gathered: "bool | Collection[str]" = False, sizes=None, mesh=None) -> Program:
    """Derive the algorithm, forward and backward, of a chain of products such as the one-line types of Part 5.

    The first operand flows in from the layer before; the others are weights (or anything else that exists beforehand).
    Between products a dim that both operands have is contracted, unless `*_D` names one. In the last product the result
    decides which dims are contracted.

    Args:
        line: the chain of products, as text or a Line.
        keep_gathered: the arrays that the backward pass need not gather again. False means none; True means the
            activations, at their price in memory; or give the names of arrays.
        sizes: the sizes of the dims, as for `matmul`. Without them the book's rules decide.
        mesh: the axes and their sizes, as for `matmul`.

    Raises:
        ShardingError: the line is not such a chain.
    """
    line = parse_line(line)
    for spec in (*line.operands, line.result):
        parse_plain(spec)
    dims = dict.fromkeys(dim for spec in (*line.operands, line.result) for dim in spec.dim_names)
    known = known_sizes(dims, sizes)
    axes = None if mesh is None else tuple(mesh_sizes(mesh).items())
    keep = keep_gathered if isinstance(keep_gathered, bool) else tuple(sorted(keep_gathered))
    return _derive(line, keep, known, axes)


@lru_cache(maxsize=256)
def _derive(line, keep, sizes, mesh) -> Program:
    sizes, mesh = (None if sizes is None else dict(sizes)), (None if mesh is None else dict(mesh))
    operands, out = line.operands, line.result
    if len(operands) < 2:
        raise ShardingError(f"{line}: a chain of products has two operands or more\n  fix: use reshard for one array")
    names = [spec.name for spec in (*operands, out)]
    if "" in names or len(set(names)) < len(names):
        raise ShardingError(
            f"{line}: every array needs a name of its own, to be followed through the algorithm"
            "\n  fix: name each, as In and W"
        )
    dims = _chain_dims(line)
    hidden = ["Tmp"] if len(operands) == 3 else [f"Tmp{n}" for n in range(1, len(operands) - 1)]
    results = [Spec(name, tuple((d, ()) for d in kept)) for name, kept in zip((*hidden, out.name), dims, strict=True)]
    products, tail, note = product_chain(operands, results, out, sizes, mesh)
    keep = {operands[0].name} if keep is True else set(keep or ())
    if unknown := keep - {spec.name for spec in operands}:
        raise ShardingError(
            f"{line}: keep_gathered names {min(unknown)}, which is not an operand of the line"
            "\n  fix: name operands of the line, as it spells them"
        )
    backward, kept = transposed(operands[0], out, products, keep, sizes, mesh)
    carried = set(operands[0].dim_names)  # dims of the first operand that no product contracts: the tokens
    for product in products:
        carried -= set(product.einsum.contracted)
    loss = Spec("Loss", tuple((dim, axes) for dim, axes in out.dims if dim in carried))
    forward = [step for product in products for step in product.steps]
    forward += [*tail, Step("Loss", (), out, loss)]
    given = Step("Cotangent", (), loss, out.cotangent())
    wholes = tuple(product.einsum.operands[0] for product in products[1:])
    return Program(
        operands,
        out,
        scheduled(forward, operands[0], out),
        scheduled([given, *backward], out.cotangent(), operands[0].cotangent()),
        tuple(dict.fromkeys((*operands, *wholes, *kept))),
        wholes,
        note,
    )


def _chain_dims(line) -> tuple[tuple[str, ...], ...]:
    """Return the result dims of each product of the chain."""
    operands, out, results = line.operands, line.result, []
    said = line.contract if len(line.contract) == len(operands) - 1 else None
    current = operands[0].dim_names
    for number, spec in enumerate(operands[1:-1]):
        shared = [dim for dim in current if dim in spec.dim_names]
        summed = [said[number]] if said else shared
        if not shared or any(dim not in shared for dim in summed):
            raise ShardingError(
                f"{line}: product {number + 1} has no dim to contract\n"
                f"  fix: give both operands the dim, and name it if several are shared: *_D"
            )
        current = tuple(d for d in current if d not in summed)
        current += tuple(d for d in spec.dim_names if d not in summed and d not in current)
        results.append(current)
    missing = [dim for dim in out.dim_names if dim not in current + operands[-1].dim_names]
    alone = [dim for dim in set(current) ^ set(operands[-1].dim_names) if dim not in out.dim_names]
    if missing or alone:
        what = f"dim {missing[0]} of the result is in no operand" if missing else f"dim {min(alone)} meets no other"
        raise ShardingError(
            f"{line}: {what}\n  fix: check the dims: each is in the result or in both operands of a product; "
            f"`*_D` says which one a product contracts. A chain has no branches: write a gated MLP by its lines"
        )
    return (*results, out.dim_names)


def transposed(
    first: Spec, out: Spec, products: tuple[Product, ...], keep: Collection[str], sizes, mesh
) -> tuple[list[Step], list[Spec]]:
    """Return the lines of the backward pass, from the last product to the first, and the types that `keep` keeps."""
    steps: list[Step] = []
    kept: list[Spec] = []
    bring = resharder(sizes, mesh)

    def again(forward: tuple[Step, ...], local: Spec) -> None:
        """Provide an argument as its product needs it: keep it from the forward pass, or reshard it once more."""
        if forward and local.name in keep:
            kept.append(local)
        else:
            steps.extend(forward)

    def gradient(a: Spec, b: Spec, of: Spec, typed: Spec) -> None:
        """Add the cotangent of `of` as a product of the two others, and its way to the cotangent of type `typed`."""
        product = product_type(a, b, of.dim_names, "d" + of.name)
        steps.append(Step("Einsum", (), (a, b), product))
        steps.extend(bring(product, typed.cotangent()))

    held = out
    for product in reversed(products):
        (a, b), needed = product.einsum.operands, product.einsum.after.cotangent()
        steps.extend(bring(held.cotangent(), needed))
        if product is products[0]:
            again(product.a_steps, a)
        gradient(a, needed, b, product.b_steps[0].operands[0] if product.b_steps else b)
        again(product.b_steps, b)
        held = first if product is products[0] else a
        gradient(needed, b, a, held)
    return steps, kept


def scheduled(steps, enters: Spec, leaves: Spec) -> tuple[Step, ...]:
    """Mark each step's `when`: does it wait for the layer's input, and does the layer's output wait for it?"""
    flowing, needed, marked = {enters}, {leaves}, []
    for step in steps:
        if any(spec in flowing for spec in step.operands):
            flowing.add(step.after)
    for step in reversed(steps):
        on_path = step.after in needed
        needed |= set(step.operands) if on_path else set()
        waits = any(spec in flowing for spec in step.operands)
        marked.insert(0, replace(step, when="ahead" if not waits else "critical" if on_path else "async"))
    return tuple(marked)
