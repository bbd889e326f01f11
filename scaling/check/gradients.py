"""Derivatives, read and not run (see scaling.check): what is differentiated, and what an optimizer is given.

By the law of cotangents (notation.md) a loss is differentiated while it is unreduced, and the gradient of an array that
is replicated over an axis over which the loss is unreduced is unreduced over it, too.
"""

import ast
from dataclasses import dataclass

from scaling.check.part import Part
from scaling.check.rules import broken_rule, said, under_way
from scaling.check.values import Each, Function, Gone, Many, Pull, Record, Shard, arrays_in, settled
from scaling.spec import format_axes


@dataclass(frozen=True, eq=False)
class Gradient:
    """What torch.func.grad(f) returns, or with `value` grad_and_value(f)."""

    f: Function
    value: bool
    aux: bool
    at: object  # argnums


class Derivatives(Part):
    """The part of the reader that knows derivatives and optimizers."""

    TRANSFORMS = ("grad", "grad_and_value", "value_and_grad", "vjp", "jacrev", "checkpoint")

    def transform(self, name: str, node: ast.Call, args: list, keywords: dict, frame):
        """torch.func.grad(f), vjp(f, *primals), autograd.grad(loss, ...)."""
        f = args[0] if args else None
        if not isinstance(f, Function):
            if len(node.args) < 3 and not keywords.get("grad_outputs"):
                self.differentiated(node, f, frame)
            return None
        if name == "checkpoint":
            return self.followed_call(f, node, args[1:], keywords, False, frame)
        aux = any(k.arg == "has_aux" and getattr(k.value, "value", False) is True for k in node.keywords)
        if name == "vjp":
            found = self.followed_call(f, node, args[1:], {}, False, frame)
            result, rest = (found.items[0], found.items[1:]) if aux and isinstance(found, Many) else (found, (None,))
            self.differentiated(node, result, frame)
            pull = Pull(tuple(args[1:]), result)
            return Many((result, pull, *rest[:1])) if aux else Many((result, pull))
        unknown = [self.unknown() for _ in f.node.args.args]
        found = self.followed_call(f, node, unknown, {}, False, frame)
        self.differentiated(node, found.items[0] if aux and isinstance(found, Many) and found.items else found, frame)
        at = next((k.value.value for k in node.keywords if k.arg == "argnums" and isinstance(k.value, ast.Constant)), 0)
        return Gradient(f, name != "grad", aux, at)

    def differentiate(self, gradient: Gradient, node: ast.Call, args: list, keywords: dict, frame):
        """The gradient at these arguments."""
        found = self.followed_call(gradient.f, node, args, keywords, False, frame)
        loss, rest = found, ()
        if gradient.aux and isinstance(found, Many) and found.items:
            loss, rest = found.items[0], found.items[1:2]
        self.differentiated(node, loss, frame)
        at = gradient.at if isinstance(gradient.at, int) and gradient.at < len(args) else None
        grads = None if at is None else _cotangent(args[at], loss)
        if gradient.value:
            return Many((grads, Many((loss, *rest)) if rest else loss))
        return Many((grads, *rest)) if rest else grads

    def cotangents(self, pull: Pull):
        return Many(tuple(_cotangent(primal, pull.result, guess=True) for primal in pull.primals))

    def differentiated(self, node: ast.AST, loss, frame) -> None:
        """Report a loss that was reduced before it is differentiated."""
        whole = isinstance(loss, Shard) and not loss.loose and not loss.spec.dims and not loss.spec.unreduced
        if whole and loss.summed:
            what = f"{loss.spec} is differentiated after an all_reduce: every device would count the others' terms"
            fix = "differentiate each device's own terms, Loss[] {U_X}, and all_reduce the value afterwards"
            self.report(node, "loss", said(what, "loss", fix), frame)

    def is_optimizer(self, node: ast.Call, args: list, keywords: dict) -> bool:
        """Whether a call of `.update` is an optimizer's, `update(grads, state, params)`."""
        return len(args) + len({"grads", "state", "params"} & set(keywords)) >= 3

    def optimizer_update(self, node: ast.Call, args: list, keywords: dict, frame):
        given = dict(zip(("grads", "state", "params"), args, strict=False)) | keywords
        self.hold_gradients(node, given.get("grads"), given.get("params"), frame)
        if any(k.arg == "donate" and getattr(k.value, "value", False) is True for k in node.keywords):
            for argument in node.args[1:3]:
                if isinstance(argument, ast.Name):
                    frame.env[argument.id] = Gone(ast.unparse(node.func), node.lineno)
        return Many((given.get("params"), given.get("state")))

    def hold_gradients(self, node: ast.AST, grads, params, frame) -> None:
        """Gradients are reduced, to the types of their params, before an optimizer gets them."""
        wanted = {where: settled(held).spec for where, held in arrays_in(params)}
        for where, held in arrays_in(grads):
            what = f"grads{where} is {held.spec}"
            if held.pending:
                self.report(node, "pending", f"{what}: {under_way()}", frame)
            elif held.spec.unreduced:
                axes = format_axes(held.spec.unreduced)
                fix = f"all_reduce or reduce_scatter it over {axes} first"
                self.report(node, "gradient", said(f"{what}, a partial sum", "gradient", fix), frame)
            elif where in wanted and held.sure and (wrong := broken_rule(held, wanted[where])):
                self.report(node, "gradient", f"{what}, its param {wanted[where]}: {wrong[1]}", frame)


def _cotangent(primal, loss, guess: bool = False):
    """The type of the gradient of an argument: unreduced where it is replicated and the loss is a sum of terms."""
    if isinstance(primal, Record):
        return Record(tuple((key, _cotangent(item, loss, guess)) for key, item in primal.items))
    if isinstance(primal, Many):
        return Many(tuple(_cotangent(item, loss, guess) for item in primal.items))
    if isinstance(primal, Each):
        return Each(_cotangent(primal.item, loss, guess))
    if not isinstance(primal, Shard) or not isinstance(loss, Shard) or primal.loose or primal.pending or loss.loose:
        return None
    over = {*loss.spec.unreduced} | ({*loss.spec.axes} if guess else set())
    unreduced = {axis for axis in over if axis not in primal.spec.axes and axis not in primal.spec.unreduced}
    return primal.typed(unreduced=unreduced, sure=primal.sure and loss.sure and not guess, parts="sum", summed=False)
