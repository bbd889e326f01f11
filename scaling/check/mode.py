"""The judge at all else that torch does: aten's ops, by the rules of `infer`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from scaling.algebra.ops import op_kind
from scaling.check.compared import place_of_call
from scaling.check.findings import Judgement, said
from scaling.check.held import DimPart, HeldType, axes_along, size_along
from scaling.check.ops import UNSET, NotInferred, RuleBroken, infer, of_nothing
from scaling.check.typed import TypedLines
from scaling.common.torch_private import TorchDispatchMode, storage_of
from scaling.spec import ShardingError

MADE = ("rand", "randn", "randint", "randperm", "zeros", "ones", "full", "empty")


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]


class Judge(TypedLines, TorchDispatchMode):
    """Knows the type of each array by its memory."""

    def __init__(self, report: Judgement, sizes: "Mapping[str, int] | None" = None):
        TorchDispatchMode.__init__(self)
        TypedLines.__init__(self, report, sizes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        args, kwargs, tensors = self.prepared(func, name, args, kwargs)
        short = name.strip("_")
        if short in MADE and not self.quiet:  # on the meta device; random numbers are of no use
            size = next((list(a) for a in args if isinstance(a, (list, tuple, torch.Size))), [])
            size = [args[0]] if short == "randperm" else size
            dtype = kwargs.get("dtype") or (
                torch.long if short in ("randint", "randperm") else torch.get_default_dtype()
            )
            if short == "full" and kwargs.get("dtype") is None:
                dtype = torch.tensor(args[1]).dtype
            x = torch.empty(size, dtype=dtype, device="meta")
            self.give(x, of_nothing(x.shape, short == "zeros"), unset=short == "empty")
            return x
        if (found := self.by_values(short, args, kwargs, tensors)) is not None:
            return found[0]
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if op_kind(short) in ("adds", "multiplies", "divides", "nonlinear", "contracts") and not self.quiet:
                with self.judging():  # the shapes do not fit: most likely since the types do not
                    infer(short, args, kwargs, [self.held(x) for x in tensors], tensors[:1])
            raise
        results = tensors_in(result)
        if self.quiet or not results:
            return result
        with self.judging():
            self.after(func, short, args, kwargs, tensors, results)
        return result

    def prepared(self, func, name: str, args: Any, kwargs: dict) -> tuple:
        """The arguments on one device: where one is meta, all are; random numbers are of no use."""
        tensors = tensors_in((args, kwargs))
        if tensors and any(x.is_meta for x in tensors) and not all(x.is_meta for x in tensors):
            swap = lambda x: self.twin(x) if isinstance(x, Tensor) and not x.is_meta else x  # noqa: E731
            given: Any = (args, kwargs)
            both: Any = optree.tree_map(swap, given, none_is_leaf=True)
            args, kwargs = both
            tensors = tensors_in(both)
        return args, kwargs, tensors

    def by_values(self, name: str, args, kwargs, tensors: list[Tensor]) -> "list | None":
        """What the numbers decide, of which there are none: some number, all rows."""
        if not tensors or not tensors[0].is_meta:
            return None
        x = tensors[0]
        if name in ("local_scalar_dense", "equal", "is_nonzero"):
            self.skip(f"{name}: a value is read, which may decide")
            return [
                True if name != "local_scalar_dense" or x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1
            ]
        if name == "nonzero":
            self.skip("nonzero: a value decides")
            return [torch.zeros(x.numel(), max(1, x.dim()), dtype=torch.long, device="meta")]
        if name == "to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.skip("to the CPU: values are read")
            with self.silence():
                made = torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype)
            self.give(made, self.held(x))
            return [made]
        if name == "split_with_sizes" and sum(args[1]) != x.shape[args[2] if len(args) > 2 else 0]:
            self.skip("values decide how rows are split")
            dim = args[2] if len(args) > 2 else 0
            even, rest = divmod(x.shape[dim], len(args[1]))
            return [list(torch.split(x, [even + (i < rest) for i in range(len(args[1]))], dim))]
        if name == "repeat_interleave":
            return [torch.empty(x.numel(), dtype=torch.long, device="meta")]
        if name == "bincount":
            return [
                torch.zeros(args[2] if len(args) > 2 else kwargs.get("minlength", 1), dtype=torch.long, device="meta")
            ]
        if name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            self.skip("a mask decides which rows")
            n = sum(i.dim() for i in args[1] if isinstance(i, Tensor))
            made = x.new_empty((x.shape[:n].numel(), *x.shape[n:]))
            self.give(made, replace(self.held(x), dims=((DimPart(len(made)),), *self.held(x).dims[n:]), name=""))
            return [made]
        return None

    @contextmanager
    def judging(self, place: str = "") -> Iterator[None]:
        try:
            yield
        except RuleBroken as error:
            self.find(error.rule, said(error.what, error.rule, error.fix), error.made, place)
        except NotInferred as error:
            self.skip(str(error), place)

    def after(self, func, name: str, args, kwargs, tensors: list[Tensor], results: list[Tensor]) -> None:
        """The types of the results."""
        if name == "copy":
            self.write(tensors[0], self.held(tensors[-1]), False)
            return
        mine = {storage_of(x) for x in tensors}
        views = func._schema.name and all(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if views and results and all(storage_of(x) in mine for x in results):
            if name in ("slice", "split", "split_with_sizes", "narrow", "chunk", "split_copy") and results:
                self.cut(tensors[0], results[0])
            for x in results:
                self.held(x)  # which splits the pieces
            return
        into = [x for x, a in zip(args, func._schema.arguments, strict=False) if isinstance(x, Tensor) and a.is_write]
        into += [x for k, x in kwargs.items() if k == "out" and isinstance(x, Tensor)]
        operands = [self.held(x) for x in tensors_in((args, {k: x for k, x in kwargs.items() if k != "out"}))]
        if name in UNSET:
            for x in results:
                self.give(x, of_nothing(x.shape), unset=True)
            return
        if op_kind(name) in ("adds", "fuses", "joins"):
            operands = self.shares(operands)
        quietly = all(x.made == "of nothing" for x in operands)
        try:
            found = infer(name, args, kwargs, operands, results)
        except (RuleBroken, NotInferred, ShardingError) as error:
            if isinstance(error, RuleBroken):
                error.made = operands[min(error.operand, len(operands) - 1)].place
            else:
                error = NotInferred(f"{name}: {str(error).splitlines()[0]}")
            for x in into or results:
                self.give(x, of_nothing(x.shape, True))
            raise error from None
        self.report.judged += not quietly
        shares = frozenset().union(*(x.shares for x in operands))
        if op_kind(name) == "divides" and isinstance(args[1], (int, float)):
            shares |= {int(args[1])}
        place = place_of_call() if not quietly and not self.quiet else ""
        for x, held in zip(into or results, found, strict=False):
            held = replace(held, place=place, shares=shares | held.shares)
            if into:
                self.write(x, held, False)
            elif tuple(map(size_along, held.dims)) != tuple(x.shape):
                self.give(x, replace(of_nothing(x.shape), unreduced=held.unreduced, parts=held.parts, made=""))
            else:
                self.give(x, held)

    def shares(self, operands: list[HeldType]) -> list[HeldType]:
        """A whole array that was divided by the number of devices along X is a share of each: unreduced over X."""
        every = frozenset().union(*(x.unreduced or () for x in operands))
        found = []
        for x in operands:
            missing = every - x.unreduced if x.unreduced is not None else frozenset()
            if missing and prod(self.sizes.get(axis, 1) for axis in missing) in x.shares:
                x = replace(x, unreduced=every, parts="sum")
            found.append(x)
        return found

    def cut(self, x: Tensor, part: Tensor) -> None:
        """A part of a merged dim: its pieces are one from here on."""
        known = self.memory.get(storage_of(x))
        if known is None or x.dim() != part.dim():
            return
        dims = known.view(x.shape, x.stride()).dims
        for i, dim in enumerate(dims):
            if len(dim) > 1 and x.shape[i] != part.shape[i]:
                first, end = x.stride(i), x.stride(i) * x.shape[i]
                rest = [(s, p) for s, p in known.pieces if not first <= s < end]
                one = int(first), DimPart(int(x.shape[i]), None, axes_along(dim))
                known.pieces = sorted([*rest, one], key=lambda each: each[0], reverse=True)

    def write(self, x: Tensor, held: HeldType, add: bool) -> None:
        """`held` is written to x, which may be a part of its memory."""
        known = self.memory.get(storage_of(x))
        old = self.held(x)
        adds = add and known is not None and not known.unset and old.made != "of nothing"
        if adds and None not in (old.unreduced, held.unreduced) and old.unreduced != held.unreduced:
            raise RuleBroken("partial-plus-whole", f"{held} is added to {old}")
        if (
            known is not None
            and (whole := known.keep) is not None
            and x.numel() * x.element_size() < x.untyped_storage().nbytes()
        ):
            dims = {s: dim for n, s, dim in zip(x.shape, x.stride(), held.dims, strict=False) if n > 1 and s}
            pieces = []
            for n, s, dim in zip(whole.shape, whole.stride(), self.held(whole).dims, strict=True):
                source = dims.get(s)
                pieces.append(source if source and size_along(source) == n else dim)
            self.give(whole, replace(held, dims=tuple(pieces)))
            return
        if tuple(map(size_along, held.dims)) == tuple(x.shape):
            self.give(x, held)
        else:
            self.give(x, replace(of_nothing(x.shape), unreduced=held.unreduced, parts=held.parts, made=held.made))

    def end(self) -> None:
        for pending, place, line in self.pending:
            if pending.finish is not None:
                self.find("never-waited", f"{line}\n  " + said("it is under way", "never-waited", "wait(x)"), "", place)
                pending.finish = None
