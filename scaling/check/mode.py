"""The judge at aten's ops, which are all of torch's operations besides typed lines: it applies the law."""

from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import optree
import torch
from torch import Tensor

from scaling.algebra.labels import argument
from scaling.algebra.law import Illegal
from scaling.algebra.ops import op_kind
from scaling.check.findings import RULES, Judgement, fault_text, place_of_call
from scaling.check.held import (
    DimPart,
    HeldType,
    any_dim,
    axes_along,
    by_stride,
    ring_block,
    size_along,
    untyped,
    written_dim,
)
from scaling.check.inferred import called, inferred, tensors_in
from scaling.check.results import UNSET, ArrayMeta, view_error
from scaling.check.typed import TypedLines
from scaling.common.torch_private import OpMode, storage_of
from scaling.spec import format_axes

MADE = ("rand", "randn", "randint", "randperm", "zeros", "ones", "full", "empty")
FITTED = ("adds", "multiplies", "divides", "nonlinear", "contracts")
ROWS = ("select", "unbind")  # views of single rows
PARTS = ("slice", "split", "split_with_sizes", "narrow", "chunk", "split_copy")


@lru_cache
def returns(func: Any) -> "tuple[str, str]":
    """Return (the op's name, whether it makes "new" arrays, "views" its operand or "writes")."""
    schema = func._schema
    aliases = [each.alias_info for each in schema.returns]
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments):
        how = "writes"
    else:
        how = "views" if any(each is not None for each in aliases) else "new"
    return schema.name.partition("::")[2].strip("_"), how


class Judge(TypedLines, OpMode):
    """Knows the type of each array by its memory."""

    def __init__(self, report: Judgement, sizes: "Mapping[str, int] | None" = None):
        OpMode.__init__(self)
        TypedLines.__init__(self, report, sizes)
        self.own_rows: dict[str, frozenset[str]] = {}  # {line that takes single rows: axes of these rows}
        self.ring: set[str] = set()  # axes along which blocks may yet be passed on
        self.first_hops: list[tuple[Set[str], tuple[str, str, str, str]]] = []  # (axes, finding unless a ring)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, how = returns(func)
        everything: Any = (args, kwargs or {})
        leaves, structure = optree.tree_flatten(everything, none_is_leaf=True)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        meta = any(x.is_meta for x in tensors)
        if meta and not all(x.is_meta for x in tensors):  # if one has no numbers, all are taken to have none
            leaves = [self.twin(x) if isinstance(x, Tensor) else x for x in leaves]
            tensors = [x for x in leaves if isinstance(x, Tensor)]
        given: Any = optree.tree_unflatten(structure, leaves)
        args, kwargs = given
        if name in MADE and not self.quiet:  # random numbers are not needed
            x = func(*args, **kwargs | {"device": "meta", **({"generator": None} if "generator" in kwargs else {})})
            self.give(x, untyped(tuple(x.shape), name == "zeros"), unset=name == "empty")
            return x
        if meta and (found := self.by_values(name, args, kwargs, tensors[0])) is not None:
            return found[0]
        if self.quiet:
            return func(*args, **kwargs)
        seen = self.seen(leaves, name)
        try:
            if how == "new" and meta:
                made, within, error = called(func, name, structure, seen)
                results = [x.tensor() if isinstance(x, ArrayMeta) else x for x in made]
                self.give_all(
                    results, [x.held for x in made if isinstance(x, ArrayMeta)], error, tensors, name in UNSET
                )
                return optree.tree_unflatten(within, results)
            result = func(*args, **kwargs)
        except RuntimeError:
            if op_kind(name) in FITTED:  # the shapes do not fit, most likely because the types do not
                self.wrong(inferred(func, name, structure, seen, tensors[:1])[1], tensors)
            raise
        results = tensors_in(result)
        if how == "views":
            if name in PARTS:
                self.cut(tensors[0], results[0])
            self.wrong(view_error(name, args, kwargs, self.held(tensors[0])), tensors)
            self.wrong(self.across_joint(name, tensors[0], results), tensors)
            if axes := self.taken_from(name, args, kwargs, tensors[0], results):
                self.own_rows[self.shown_at(place_of_call())] = frozenset(axes)
            for x in results:
                held = self.held(x)  # this splits the pieces
                if 1 in x.shape:
                    self.ones |= self.held(tensors[0]).axes - held.axes
        elif name == "copy":
            self.write(tensors[0], self.held(tensors[-1]))
        elif results:
            found, error = inferred(func, name, structure, seen, results)
            self.give_all(results, found, error, tensors, name in UNSET, how == "writes")
        return result

    def seen(self, leaves: list, name: str) -> tuple:
        """Return an op's arguments with an ArrayMeta for each array.

        A whole array that was divided by the number of devices along X counts as a partial sum over X if it is added to
        one, since each device adds its share.
        """
        found, order = [], []
        for x in leaves:
            if isinstance(x, Tensor):
                order.append(id(x))
                held = self.held(x)._replace(place="")
                if self.ring & (held.axes | (held.unreduced or frozenset())):
                    held = ring_block(held, self.ring)
                x = ArrayMeta(tuple(x.shape), x.stride(), x.dtype, held, order.index(id(x)))
                found.append(x)
            else:
                found.append((type(x), x))
        helds = [x.held for x in found if isinstance(x, ArrayMeta)]
        if (self.ones or any(x.shares for x in helds)) and op_kind(name) in ("adds", "fuses", "joins"):
            every = frozenset().union(*(x.unreduced or () for x in helds))
            found = [x._replace(held=self.as_share(x.held, every)) if isinstance(x, ArrayMeta) else x for x in found]
        return tuple(found)

    def as_share(self, held: HeldType, axes: Set[str]) -> HeldType:
        """Return the type as a term of a sum over these axes, if it was divided by as many devices or may be one."""
        missing = axes - held.unreduced if held.unreduced is not None and not held.is_untyped else frozenset()
        if not missing or not (missing <= self.unseen(held) or self.is_share(held, missing)):
            return held
        return held._replace(unreduced=frozenset(axes), parts="sum")

    def by_values(self, name: str, args, kwargs, x: Tensor) -> "list | None":
        """Return stand-ins for results that depend on numbers, which a meta tensor lacks; None for any other op."""
        if name in ("local_scalar_dense", "equal", "is_nonzero"):
            self.skip("a number of an array is read here (item(), float(), if), and may decide what runs after it")
            number = 1.0 if x.is_floating_point() else 1
            return [number if name == "local_scalar_dense" and x.dtype != torch.bool else True]
        if name == "nonzero":
            self.skip("nonzero: how many rows it finds depends on the values; all are taken")
            return [torch.zeros(x.numel(), max(1, x.dim()), dtype=torch.long, device="meta")]
        if name == "to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.skip("an array goes to the CPU, where its values are read and may decide what runs after it")
            with self.silence():
                made = torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype)
            self.give(made, self.held(x))
            return [made]
        dim = args[2] if len(args) > 2 else 0
        if name == "split_with_sizes" and sum(args[1]) != x.shape[dim]:
            self.skip("how rows are split depends on values; even parts are taken")
            even, rest = divmod(x.shape[dim], len(args[1]))
            return [list(torch.split(x, [even + (i < rest) for i in range(len(args[1]))], dim))]
        if name in ("repeat_interleave", "bincount"):
            rows = x.numel() if name == "repeat_interleave" else kwargs.get("minlength", dim or 1)
            made, held = torch.empty(rows, dtype=torch.long, device="meta"), self.held(x)
            if name == "bincount" and held.axes:  # each device counts its own
                self.give(made, HeldType((any_dim(rows),), frozenset(held.axes), "sum"))
            return [made]
        if name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            self.skip("a mask chooses rows by their values; all are taken")
            n = sum(i.dim() for i in args[1] if isinstance(i, Tensor))
            made = x.new_empty((x.shape[:n].numel(), *x.shape[n:]))
            self.give(made, self.held(x)._replace(dims=(any_dim(len(made)), *self.held(x).dims[n:]), name=""))
            return [made]
        return None

    def wrong(self, error: "Exception | None", operands: Sequence[Tensor] = (), place: str = "") -> None:
        """Report a broken rule, or an op that is not judged."""
        if isinstance(error, Illegal) and error.differ and error.differ <= self.ones:
            axes = ", ".join(sorted(error.differ))
            self.skip(f"a dim split over {axes} has one element on each device, so a view of it may be split or not")
        elif isinstance(error, Illegal):
            self.find(*self.broken(error, operands), place)
        elif error is not None:
            self.skip(str(error), place)

    def broken(self, error: Illegal, operands: Sequence[Tensor]) -> tuple[str, str, str]:
        """Return (rule, the finding's text, the place where the operand was made)."""
        made = self.held(operands[min(error.operand, len(operands) - 1)]).place if operands else ""
        return error.name, fault_text(error.what, error.name, error.fix, error.rule), made

    def first_hop(self, error: Illegal, operands: Sequence[Tensor]) -> None:
        """Defer a finding about a product of a rank's own blocks, such as queries and keys.

        The product is right as the first hop of a ring. This shows only at the program's end, if blocks were passed on
        along this axis. Until then each block may be any device's.
        """
        self.ring |= error.twice
        self.first_hops.append((error.twice, (*self.broken(error, operands), self.shown_at(place_of_call()))))

    def give_all(self, results: list, found: list[HeldType], error, operands, unset: bool, write: bool = False) -> None:
        """Note the types of an op's results, and report its error."""
        if isinstance(error, Illegal) and error.twice:
            self.first_hop(error, operands)
        else:
            self.wrong(error, operands)
        quietly = all(self.held(x).is_untyped for x in operands)
        self.report.judged += not quietly and error is None
        place = "" if quietly else place_of_call()
        for x, held in zip([x for x in results if isinstance(x, Tensor)], found, strict=False):
            if write:
                self.write(x, held._replace(place=place))
            else:
                self.give(x, held._replace(place=place), unset)

    def taken_from(self, name: str, args, kwargs, x: Tensor, parts: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the axes of a split dim if each device takes one row of its part, or an uneven slice of it (x[1:])."""
        dims = self.held(x).dims
        if name in ROWS:
            return axes_along(dims[argument(args, kwargs, 1, "dim", 0)]) or ()
        for part in parts if name in PARTS else ():
            start = int(part.storage_offset()) - int(x.storage_offset())
            for dim, n, m, was, now in zip(dims, x.shape, part.shape, x.stride(), part.stride(), strict=True):
                if 0 < m < n and was and (n % m or start // was % m or now != was):
                    return axes_along(dim) or ()
        return ()

    def across_joint(self, name: str, x: Tensor, parts: Sequence[Tensor]) -> "Illegal | None":
        """Return the rule that a slice breaks if it has rows of two arrays that were joined in a split dim."""
        dims = self.held(x).dims
        for part in parts if name in PARTS and any(part.joints for dim in dims for part in dim) else ():
            start = int(part.storage_offset()) - int(x.storage_offset())
            for (first, *_), n, m, stride in zip(dims, x.shape, part.shape, x.stride(), strict=True):
                begin = start // stride if m < n and stride else n
                if any(begin < joint < begin + m for joint in first.joints):
                    over = format_axes(first.axes or ())
                    what = f"{name} takes neighbouring rows of two arrays that were joined, each split over {over}"
                    rule = "the last row of a device's part is followed by the next device's first, not by its own"
                    return Illegal(what, rule, "ppermute the rows that another device has, and join those")
        return None

    def cut(self, x: Tensor, part: Tensor) -> None:
        """Join the pieces of a merged dim if `part` has only some of them, as no view can separate them afterwards."""
        known = self.memory.get(storage_of(x))
        if known is None or x.dim() != part.dim():
            return
        for dim, n, stride, left in zip(self.held(x).dims, x.shape, x.stride(), part.shape, strict=True):
            if len(dim) > 1 and n != left:
                rest = [(s, p) for s, p in known.pieces if not stride <= s < stride * n]
                known.pieces = by_stride([*rest, (stride, DimPart(n, None, axes_along(dim)))])

    def write(self, x: Tensor, held: HeldType, add: bool = False) -> None:
        """Note that an array of type `held` is written to x, which may be a part of its memory."""
        known, old = self.memory.get(storage_of(x)), self.held(x)
        adds = add and known is not None and not known.unset and not old.is_untyped
        if adds and None not in (old.unreduced, held.unreduced) and old.unreduced != held.unreduced:
            rule = "partial-plus-whole"
            self.wrong(Illegal(f"{held} is added to {old}", RULES[rule], name=rule), (), held.place)
            return
        if known is None or x.numel() * x.element_size() >= x.untyped_storage().nbytes():
            was = known.held.dims if known is not None and known.held.shape == held.shape else held.dims
            self.give(x, held._replace(dims=tuple(map(written_dim, was, held.dims))))
            return
        dims = {s: dim for n, s, dim in zip(x.shape, x.stride(), held.dims, strict=False) if n > 1 and s}
        whole, pieces = known.keep, []
        for n, s, dim in zip(whole.shape, whole.stride(), self.held(whole).dims, strict=True):
            source = dims.get(s)
            pieces.append(source if source and size_along(source) == n else dim)
        self.give(whole, held._replace(dims=tuple(pieces)))

    def end(self) -> None:
        """Report the findings that only the program's end shows."""
        for axes, finding in self.first_hops:
            if not axes <= self.passed_on:
                self.find(*finding)
        for place, axes in self.own_rows.items():
            if not axes <= self.messaged | self.passed_on:  # stages and rings mean their own rows
                self.skip(
                    f"each device takes rows of its own part of what is split over {', '.join(sorted(axes))}", place
                )
        never = [(line, place, "in flight") for pending, place, line in self.pending if pending.finish is not None]
        never += [(product.line, shown, "deferred") for product, _, shown in self.deferred.values()]
        for line, place, what in never:
            self.find("never-waited", f"{line}\n  " + fault_text(f"it is {what}", "never-waited", "wait(x)"), "", place)
        for pending, *_ in self.pending:
            pending.finish = None
