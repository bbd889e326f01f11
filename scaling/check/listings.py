"""A strategy's listing followed from function to function (see scaling.check): what gather returns, forward gets.

A listing is `SPECS` and its functions, given to `Strategy(SPECS, forward, backward, gather, reduce, ...)`:
gather(*weights), forward(*weights, In), backward(*weights, dOut, saved), reduce(*gradients), reduce_slow(*gradients).
"""

import ast
from dataclasses import replace

from scaling.check.part import Part
from scaling.check.values import Array, Many, difference
from scaling.spec import Spec

FIELDS = ("SPECS", "layer_forward", "layer_backward", "gather", "reduce", "reduce_slow", "GRADS")


def listings(tree: ast.Module) -> list[dict[str, str]]:
    """{field: name} of each `Strategy(...)` of the module: the names of SPECS and of the functions that it is given."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Strategy":
            given = dict(zip(FIELDS, node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
            found.append({field: ast.unparse(value) for field, value in given.items() if field})
    return found


class Listings(Part):
    """The part of the reader that follows listings; `followed` holds the names of the functions that it has read."""

    def follow(self, names: dict[str, str], grads: dict[str, Spec]) -> None:
        """Read the functions of one listing with what they are given; hold what they return against the types.

        `grads`: the types of the gradients, if they are not those of the weights.
        """
        functions = {field: self.functions.get(name) for field, name in names.items()}
        weights = [name for name in self.specs if name not in ("In", "Out")]
        if not weights or "In" not in self.specs or "Out" not in self.specs:
            return
        W = [Array(self.specs[name]) for name in weights]
        if fn := functions.get("gather"):
            W = self.several(self.run_listed(fn, W), len(weights))
        elif "gather" in names:
            W = [None] * len(weights)
        saved = None
        if fn := functions.get("layer_forward"):
            Out, saved = self.several(self.run_listed(fn, [*W, Array(self.specs["In"])]), 2)
            self.hold(fn, "Out", Out, self.specs["Out"])
        products = [None] * len(weights)
        if fn := functions.get("layer_backward"):
            dOut = Array(self.specs["Out"].with_name("dOut"))
            result = self.run_listed(fn, [*W, dOut, saved])
            dIn, *products = self.several(result, 1 + len(weights))
            self.hold(fn, "dIn", dIn, self.specs["In"])
        last = functions.get("layer_backward")
        for field in ("reduce", "reduce_slow"):
            if fn := functions.get(field):
                settled = [replace(p, pending=False) if isinstance(p, Array) else p for p in products]
                products, last = self.several(self.run_listed(fn, settled), len(weights)), fn
        if last and (names.get("reduce") is None or functions.get("reduce")):
            for name, product in zip(weights, products, strict=True):
                self.hold(last, "d" + name, product, grads.get(name, self.specs[name]))

    def run_listed(self, fn: ast.FunctionDef, values: list):
        """Read a function with its first arguments known; what it returns. Weights may be under way: einsum waits."""
        self.followed.add(fn.name)
        arguments = [a.arg for a in fn.args.posonlyargs + fn.args.args]
        return self.function(fn, dict(zip(arguments, values, strict=False)))

    def several(self, value, count: int) -> list:
        """The items of a tuple of this length; of anything else nothing is known."""
        if isinstance(value, Many) and len(value.items) == count:
            return list(value.items)
        return [value] if count == 1 else [None] * count

    def hold(self, fn: ast.FunctionDef, what: str, result, wanted: Spec) -> None:
        """What a function returns, even if it is still under way, is of the type that SPECS says."""
        if isinstance(result, Array) and (wrong := difference(replace(result, pending=False), wanted)):
            self.report(fn.body[-1], f"{fn.name} returns {what} as {result.spec}, but SPECS says {wanted}: {wrong}")
