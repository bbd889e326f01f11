"""Muon: the momentum of each matrix, made orthogonal; another optimizer, such as AdamW, for what is no matrix."""

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
    """Muon (Jordan 2024; Liu et al. 2025, arXiv:2502.16982), as torch.optim.Muon, for stacks of matrices and on a mesh:

        m = momentum m + (1 - momentum) g;  u = (1 - momentum) g + momentum m  (without nesterov: m)
        p = (1 - lr weight_decay) p - lr s newton_schulz(u)

    `matrices`: a tree like params, of what is a matrix its inputs and outputs, "D -> F" or "D -> N H", of the rest "";
    a dim that is not named (L, E) stacks matrices. `rest` updates what is no matrix: by default AdamW of this lr.
    `scale`, s by the sizes in and out: "original", sqrt(max(1, out/in)); "match_rms_adamw", 0.2 sqrt(max(in, out)),
    with which a learning rate of AdamW's can stay. `dtype`: of Newton-Schulz. `master`: as of `adamw`.
    `form`: how matrices that lie in shards are made orthogonal, "gathered", "owned" or "on_shards" (see `orthogonal`),
    or the "cheapest", with `intensity` FLOPs in the time of a byte (2550: a v5p's link; `chip(...).intensity("ici")`);
    in 16 bits that is never on_shards, whose sums would show the mesh.
    `update` needs `specs`, which say what each dim is, and on a mesh `mesh`. State: {"step", "momentum": like params
    where they are matrices, "rest", "master"}. ValueError where a matrix is none.
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
            step_(W, change, rate, weight_decay, ratio(scale, *view.sizes(W, mesh)))

    given = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "scale": scale, "form": form}
    return _with_rest(matrices, pure(step, lr, ("momentum",), master, given), rest)


def _with_rest(matrices, rule: Optimizer, rest: Optimizer) -> Optimizer:
    """`rule` for the leaves that `matrices` names, `rest` for the others, whose state is "rest" in the first's."""

    def split(of) -> tuple[Any, Any]:
        """(what is a matrix, the rest), None in the other's places."""
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
        own = {name: part for name, part in state.items() if name != "rest"}
        p, own = rule.update(g, own, p, donate=donate, specs=types, mesh=mesh)
        q, state_of_rest = rest.update(dg, state["rest"], q, donate=donate, specs=others, mesh=mesh)
        taken = {True: iter(tree.leaves(p)), False: iter(tree.leaves(q))}
        new = tree.unflatten(params, [next(taken[bool(what)]) for what in tree.leaves(matrices)])
        return new, own | {"rest": state_of_rest}

    def state_specs(specs):
        found, others = split(specs)
        return rule.state_specs(found) | {"rest": rest.state_specs(others)}

    return Optimizer(init, update, state_specs)


def orthogonalized(
    changes: Sequence[Tensor], views: Sequence["Matrices"], mesh, form: str, intensity: float, dtype: torch.dtype
) -> list[Tensor]:
    """Each change with its matrices orthogonal. Those of one shape and type travel together, the largest first."""
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
    """An array of this type as a stack of matrices M[S, O, I]: `what` names the dims of its inputs and its outputs."""

    spec: Spec
    what: str

    @property
    def dims(self) -> tuple[list[str], list[str], list[str]]:
        """(those that stack matrices, the outputs', the inputs'). ShardingError if the type lacks one."""
        inputs, outputs = (side.split() for side in self.what.split("->"))
        if missing := [dim for dim in inputs + outputs if dim not in self.spec.dim_names]:
            raise ShardingError(
                f"{self.what} is no matrix of {self.spec}, which has no dim {missing[0]}\n"
                "  fix: name the dims of its inputs and of its outputs, as in D -> N H"
            )
        return [dim for dim in self.spec.dim_names if dim not in inputs + outputs], outputs, inputs

    def stack(self, mesh) -> MatrixStack:
        axes = [tuple(axis for dim in dims for axis in self.spec.axes_of(dim)) for dims in self.dims]
        return MatrixStack(Spec("M", tuple(zip("SOI", axes, strict=True))), mesh)

    def shape(self, W: Tensor) -> tuple[int, int]:
        """(O, I) of this rank's shards."""
        _, outputs, inputs = self.dims
        return self._size(W, outputs), self._size(W, inputs)

    def sizes(self, W: Tensor, mesh) -> tuple[int, int]:
        """(inputs, outputs) of a whole matrix."""
        _, outputs, inputs = self.dims
        parts = [1 if mesh is None else mesh.size([a for d in dims for a in self.spec.axes_of(d)])
                 for dims in (inputs, outputs)]  # fmt: skip
        return self._size(W, inputs) * parts[0], self._size(W, outputs) * parts[1]

    def of(self, W: Tensor) -> Tensor:
        """W -> M[S, O, I]."""
        return W.permute(self._order()).reshape(-1, *self.shape(W))

    def back(self, M: Tensor, W: Tensor) -> Tensor:
        """M[S, O, I] -> as W."""
        order = self._order()
        places = [order.index(i) for i in range(W.dim())]
        return M.reshape([W.shape[i] for i in order]).permute(places)

    def _order(self) -> list[int]:
        return [self.spec.index(dim) for dims in self.dims for dim in dims]

    def _size(self, W: Tensor, dims: Sequence[str]) -> int:
        return math.prod(W.shape[self.spec.index(dim)] for dim in dims)


def ratio(scale: str, inputs: int, outputs: int) -> float:
    """By what an orthogonal matrix is scaled, so that its step is as long whatever its shape."""
    return math.sqrt(max(1, outputs / inputs)) if scale == "original" else 0.2 * math.sqrt(max(inputs, outputs))


def step_(W: Tensor, change: Tensor, rate: "float | Tensor", weight_decay: float, by: float) -> None:
    """W <- (1 - rate weight_decay) W - rate by change, in place."""
    W.mul_(1 - rate * weight_decay)
    if isinstance(rate, Tensor):
        W.sub_(change * (rate * by))
    else:
        W.add_(change, alpha=-rate * by)


def cheapest_form(shape: Sequence[int], stack: MatrixStack, intensity: float, dtype: torch.dtype) -> str:
    """The form that takes the least time."""
    found = form_costs(shape, stack, intensity, dtype)
    forms = [form for form in FORMS if form in found and (form != "on_shards" or dtype.itemsize > 2)]
    return min(forms, key=found.__getitem__)


def check_matrices(matrices, params) -> None:
    """ValueError that names the leaf, unless the trees are alike and what is called a matrix has two dims or more."""
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
