"""Muon, which makes the momentum of each matrix orthogonal; another optimizer, such as AdamW, has the other leaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.common.arguments import flag, not_negative, one_of
from scaling.optim.checks import check_like, check_reduced
from scaling.optim.orthogonal import FORMS, MatrixStack, form_costs, orthogonal
from scaling.optim.rules import LearningRate, Optimizer, adamw, pure
from scaling.spec import ShardingError, Spec, parse

SCALES = ("original", "match_rms_adamw")


def muon(
    lr: LearningRate, matrices, *, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
    scale: str = "original", rest: Optimizer | None = None, master: bool = False, form: str = "cheapest",
    dtype: torch.dtype = torch.bfloat16, intensity: float = 2550.0,
) -> Optimizer:  # fmt: skip
    """Return Muon, as torch.optim.Muon, for stacks of matrices and on a mesh.

        m = momentum m + (1 - momentum) g;  u = (1 - momentum) g + momentum m  (without nesterov: m)
        p = (1 - lr weight_decay) p - lr s newton_schulz(u)

    Sources: Jordan 2024; Liu et al. 2025, arXiv:2502.16982. `update` needs `specs`, which name each dim, and on a mesh
    `mesh`. The state is {"step", "momentum": like the params that are matrices, "rest", "master"}.

    Args:
        lr: The learning rate.
        matrices: A tree like params with the inputs and outputs of each matrix, "D -> F" or "D -> N H", and "" for the
            other leaves. A dim that is not named (L, E) stacks matrices.
        weight_decay: The weight decay.
        momentum: The momentum.
        nesterov: Whether u is Nesterov's.
        scale: The rule for s by the sizes in and out: "original", sqrt(max(1, out/in)), or "match_rms_adamw",
            0.2 sqrt(max(in, out)), which allows the learning rate of AdamW.
        rest: The optimizer of the other leaves, by default AdamW with this lr.
        master: Keep float32 copies, as in `adamw`.
        form: How sharded matrices are made orthogonal: "gathered", "owned" or "on_shards" (`scaling.optim.orthogonal`),
            or "cheapest", which in 16 bits is never on_shards, since its sums would show the mesh.
        dtype: The dtype of Newton-Schulz.
        intensity: FLOPs in the time of one byte, for "cheapest": 2550 on a v5p's link, `chip(...).intensity("ici")`.

    Raises:
        ValueError: A leaf that `matrices` calls a matrix is not one.
    """
    not_negative(weight_decay=weight_decay, momentum=momentum, intensity=intensity)
    flag(nesterov=nesterov, master=master)
    one_of("scale", scale, SCALES)
    one_of("form", form, ("cheapest", *FORMS))
    rest = rest or adamw(lr, weight_decay=weight_decay, master=master)

    def step(lists, params, count, rate, specs, mesh) -> None:
        p, g, m = lists
        changes = []
        for M, dW in zip(m, g, strict=True):
            M.lerp_(dW, 1 - momentum)
            changes.append(dW.lerp(M, momentum) if nesterov else M)
        whats = filter(None, tree.leaves(matrices))
        views = [Matrices(parse(spec), what) for spec, what in zip(tree.leaves(specs), whats, strict=True)]
        found = orthogonalized(changes, views, mesh, form, intensity, dtype)
        for W, view, change in zip(p, views, found, strict=True):
            _, O, I = view.stack(mesh).whole((1, *view.shape(W)))
            step_(W, change, rate, weight_decay, ratio(scale, I, O))

    given = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "scale": scale, "form": form}
    return _with_rest(matrices, pure(step, lr, ("momentum",), master, given), rest)


def _with_rest(matrices, rule: Optimizer, rest: Optimizer) -> Optimizer:
    """Return `rule` for the matrices and `rest` for the other leaves, whose state is "rest" in the state of `rule`."""

    def split(of) -> tuple[Any, Any]:
        """Split a tree into the matrices and the rest, two trees with None for the leaves of the other."""
        return (tree.map(lambda x, what: x if what else None, of, matrices),
                tree.map(lambda x, what: None if what else x, of, matrices))  # fmt: skip

    def init(params):
        check_matrices(matrices, params)
        found, others = split(params)
        return rule.init(found) | {"rest": rest.init(others)}

    def update(grads, state, params, *, donate=False, specs=None, mesh=None):
        if specs is None:
            raise ValueError("muon needs the types: a matrix is known by its dims\n  fix: update(..., specs=, mesh=)")
        check_like(params, grads=grads)
        check_reduced(grads, specs, mesh)
        (g, dg), (p, q), (types, others) = split(grads), split(params), split(specs)
        moments = {name: part for name, part in state.items() if name != "rest"}
        p, moments = rule.update(g, moments, p, donate=donate, specs=types, mesh=mesh)
        q, state_of_rest = rest.update(dg, state["rest"], q, donate=donate, specs=others, mesh=mesh)
        taken = {True: iter(tree.leaves(p)), False: iter(tree.leaves(q))}
        new = tree.unflatten(params, [next(taken[bool(what)]) for what in tree.leaves(matrices)])
        return new, moments | {"rest": state_of_rest}

    def state_specs(specs):
        found, others = split(specs)
        return rule.state_specs(found) | {"rest": rest.state_specs(others)}

    return Optimizer(init, update, state_specs)


def orthogonalized(
    changes: Sequence[Tensor], views: Sequence["Matrices"], mesh, form: str, intensity: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return the changes with every matrix in them made orthogonal.

    Matrices of one shape and type are sent together, and the largest are sent first.
    """
    groups: dict[Any, list[int]] = {}
    for i, (change, view) in enumerate(zip(changes, views, strict=True)):
        groups.setdefault((view.stack(mesh), view.shape(change)), []).append(i)
    found, loads = list(changes), {}
    for (stack, shape), members in sorted(groups.items(), key=lambda group: -math.prod(group[0][1])):
        M = torch.cat([views[i].of(changes[i]) for i in members])
        chosen = form if form != "cheapest" or mesh is None else cheapest_form(M.shape, stack, intensity, dtype)
        M = orthogonal(M, stack, dtype, chosen, loads)
        for i, part in zip(members, M.split([changes[i].numel() // math.prod(shape) for i in members]), strict=True):
            found[i] = views[i].back(part, changes[i])
    return found


@dataclass(frozen=True)
class Matrices:
    """An array of this type as a stack of matrices M[S, O, I], where `what` names the dims of inputs and outputs."""

    spec: Spec
    what: str

    @property
    def dims(self) -> tuple[list[str], list[str], list[str]]:
        """The dims that stack matrices, the outputs' and the inputs'; ShardingError if the type lacks one."""
        inputs, outputs = (side.split() for side in self.what.split("->"))
        if missing := [dim for dim in inputs + outputs if dim not in self.spec.dim_names]:
            raise ShardingError(
                f"{self.what} is no matrix of {self.spec}, which has no dim {missing[0]}\n"
                "  fix: name the dims of its inputs and of its outputs, as in D -> N H"
            )
        return [dim for dim in self.spec.dim_names if dim not in inputs + outputs], outputs, inputs

    def stack(self, mesh) -> MatrixStack:
        """Return the type of M[S, O, I] on the mesh."""
        axes = [tuple(axis for dim in dims for axis in self.spec.axes_of(dim)) for dims in self.dims]
        return MatrixStack(Spec("M", tuple(zip("SOI", axes, strict=True))), mesh)

    def shape(self, W: Tensor) -> tuple[int, int]:
        """Return (O, I), the sizes of a matrix's outputs and inputs on this rank."""
        _, *sides = self.dims
        O, I = (math.prod(W.shape[self.spec.index(dim)] for dim in dims) for dims in sides)
        return O, I

    def of(self, W: Tensor) -> Tensor:
        """Return W as M[S, O, I]."""
        return W.permute(self._order()).reshape(-1, *self.shape(W))

    def back(self, M: Tensor, W: Tensor) -> Tensor:
        """Return M[S, O, I] in the shape of W."""
        order = self._order()
        places = [order.index(i) for i in range(W.dim())]
        return M.reshape([W.shape[i] for i in order]).permute(places)

    def _order(self) -> list[int]:
        return [self.spec.index(dim) for dims in self.dims for dim in dims]


def ratio(scale: str, inputs: int, outputs: int) -> float:
    """Return the factor of an orthogonal matrix that makes steps of all shapes equally long."""
    return math.sqrt(max(1, outputs / inputs)) if scale == "original" else 0.2 * math.sqrt(max(inputs, outputs))


def step_(W: Tensor, change: Tensor, rate: "float | Tensor", weight_decay: float, by: float) -> None:
    """Update in place: W <- (1 - rate weight_decay) W - rate by change."""
    W.mul_(1 - rate * weight_decay)
    if isinstance(rate, Tensor):
        W.sub_(change * (rate * by))
    else:
        W.add_(change, alpha=-rate * by)


def cheapest_form(shape: Sequence[int], stack: MatrixStack, intensity: float, dtype: torch.dtype) -> str:
    """Return the form that takes the least time."""
    found = form_costs(shape, stack, intensity, dtype)
    forms = [form for form in FORMS if form in found and (form != "on_shards" or dtype.itemsize > 2)]
    return min(forms, key=found.__getitem__)


def check_matrices(matrices, params) -> None:
    """Raise ValueError, which names the leaf, unless the trees are alike and each matrix has enough dims."""
    leaves, whats = tree.named_leaves(params), tree.named_leaves(matrices)
    if list(leaves) != list(whats):
        other = next(iter(set(leaves) ^ set(whats)), "its leaves' order")
        raise ValueError(f'matrices is not a tree like params: {other}\n  fix: give each leaf its dims, or ""')
    for where, what in whats.items():
        sides = [side.split() for side in what.split("->")] if isinstance(what, str) and what else [["D"], ["F"]]
        if len(sides) != 2 or not all(sides):
            raise ValueError(f'{where}: {what!r} names no matrix\n  fix: its inputs and outputs, as in D -> N H; or ""')
        if what and leaves[where].dim() < sum(map(len, sides)):
            raise ValueError(
                f"{where}: Muon updates matrices, and this has shape {tuple(leaves[where].shape)}\n"
                '  fix: give it "", and rest updates it'
            )
