"""What each function of torch gives, of arrays whose types are known: by the table of ops that every mode reads.

Called with aten's ops, which is what all of torch comes down to, derivatives too. A view has no rule: `held` reads it.
"""

from dataclasses import replace

from torch import Tensor

from scaling.algebra.ops import op_kind
from scaling.check.alike import NotInferred, of_nothing
from scaling.check.elements import BY_KIND, BY_NAME
from scaling.check.held import HeldType, size_along
from scaling.check.rows import BY_KIND_OF_ROWS, BY_NAME_OF_ROWS, attention_type

RULES_OF = BY_KIND | BY_KIND_OF_ROWS | BY_NAME | BY_NAME_OF_ROWS
FACTORIES = (
    "arange",
    "randperm",
    "rand",
    "randn",
    "randint",
    "full",
    "ones",
    "scalar_tensor",
    "eye",
    "normal",
    "tril_indices",
)
NOTHING = ("empty", "new_empty", "empty_strided", "new_empty_strided")
ZEROS = ("zeros", "new_zeros", "zeros_like", "empty_like", "zero")
ALIKE = (
    "new_full",
    "new_ones",
    "rand_like",
    "randn_like",
    "bernoulli",
    "full_like",
    "one_hot",
    "uniform",
    "exponential",
    "fill",
    "random",
    "normal",
    "randint_like",
)
ATTENTION = "scaled_dot_product"


def infer(name: str, args: tuple, kwargs: dict, operands: list[HeldType], results: list[Tensor]) -> list[HeldType]:
    """The types of the results of aten's op `name`."""
    shapes = [tuple(x.shape) for x in results]
    if name in FACTORIES or name in NOTHING:
        return [of_nothing(shape) for shape in shapes]
    if name == "ones_like":
        return [replace(operands[0], unreduced=frozenset(), parts="", made="seed", name="")]
    if name in ZEROS or name in ALIKE:
        alike = operands and tuple(map(size_along, operands[0].dims)) == shapes[0]
        made = of_nothing(shapes[0], name in ZEROS)
        return [replace(made, dims=operands[0].dims, made="of nothing") if alike else made]
    if all(x.made == "of nothing" for x in operands):
        zero = all(x.unreduced is None for x in operands) and op_kind(name) in (
            "linear",
            "adds",
            "multiplies",
            "divides",
            "sums",
        )
        return [replace(of_nothing(shape, zero), through=_through(name, args, operands)) for shape in shapes]
    if name.startswith(ATTENTION):
        return attention_type(name, operands, shapes)
    kind = op_kind(name)
    if (rule := RULES_OF.get(kind or "") or RULES_OF.get(name)) is not None:
        return rule(name, args, kwargs, operands, shapes)
    raise NotInferred("not in the table of ops")


def _through(name: str, args: tuple, operands: list[HeldType]) -> str:
    """The function, not known to be linear, that numbers of nothing went through, unless they were summed since."""
    kind = op_kind(name)
    if kind in ("sums", "contracts", "fuses", "reduces"):
        return ""
    squared = len(args) > 1 and args[0] is args[1]
    if kind == "nonlinear" or (kind == "multiplies" and squared) or (kind == "adds" and len(operands) == 1):
        return name
    return next((x.through for x in operands if x.through), "")
