"""The table of operations: how each torch function treats dims and partial sums. Names as data; no torch.

A name is that of the function, the method or the aten op, without underscores at its ends: `add` covers `torch.add`,
`x.__add__` and `aten.add_.Tensor`; `op_kind` gives a name's kind. An op that no row has is unknown: callers refuse it
by its name and do not guess. The judge, explicit mode, auto mode and shard_map read this table; docs/rules.md prints
it, with the cases in which they differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class OperationKind(NamedTuple):
    """One row of the table.

    Attributes:
        does: how the functions treat their arrays, in words.
        keeps: the operands whose partial sums the result keeps: "each" alone, "all" together, the "first", or "".
        names: the functions.
    """

    does: str
    keeps: str
    names: str


OP_KINDS = {
    "linear": OperationKind(
        "one array, element by element",
        "each",
        "neg negative positive clone contiguous detach alias float double half bfloat16 to to_copy type real imag "
        "conj lift_fresh",
    ),
    "adds": OperationKind("elements that meet are added", "all", "add radd sub rsub subtract lerp"),
    "multiplies": OperationKind("elements that meet are multiplied", "each", "mul rmul multiply"),
    "divides": OperationKind("elements that meet are divided", "first", "div divide truediv true_divide"),
    "chooses": OperationKind("elements of one array or the other, by a mask", "all", "where masked_fill"),
    "nonlinear": OperationKind(
        "elements that meet, in another way",
        "",
        "exp exp2 log log2 log10 log1p expm1 relu gelu silu mish sigmoid logsigmoid tanh sinh cosh sqrt rsqrt square "
        "abs cos sin tan atan atan2 asin acos reciprocal erf erfc clamp clip clamp_min clamp_max pow rpow softplus "
        "elu leaky_relu relu6 hardtanh hardswish selu maximum minimum fmax fmin eq ne lt le gt ge "
        "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor remainder fmod "
        "floor ceil round trunc floor_divide sign sgn isfinite isnan isinf invert and or xor nan_to_num threshold "
        "rdiv rtruediv int bool long short xlogy logaddexp ldexp frexp",
    ),
    "pulls": OperationKind(
        "a cotangent through a function of elements",
        "first",
        "gelu_backward silu_backward softplus_backward sigmoid_backward tanh_backward threshold_backward "
        "softmax_backward_data log_softmax_backward_data",
    ),
    "sums": OperationKind("sums over dims, which go; a split one leaves a partial sum", "each", "sum mean"),
    "reduces": OperationKind(
        "dims go in another way: each must be whole",
        "",
        "amax amin max min median prod any all logsumexp argmax argmin var std norm linalg_vector_norm",
    ),
    "contracts": OperationKind(
        "products summed over dims that the operands share", "each", "einsum matmul rmatmul mm bmm mv dot"
    ),
    "fuses": OperationKind(
        "the first operand plus a product of the others",
        "as its sum and its product",
        "addmm baddbmm addbmm addmv addcmul addcdiv linear",
    ),
    "permutes": OperationKind(
        "the same elements, the dims in another order",
        "each",
        "permute transpose swapaxes swapdims t T mT movedim moveaxis numpy_T",
    ),
    "reshapes": OperationKind(
        "the same elements in the same order, dims split and merged",
        "each",
        "reshape view unsafe_view reshape_alias flatten unflatten squeeze unsqueeze view_as reshape_as ravel",
    ),
    "broadcasts": OperationKind("new dims, and dims of one element, hold copies", "each", "expand broadcast_to"),
    "scans": OperationKind(
        "linear along dims, which stay, and must be whole",
        "each",
        "cumsum flip tril triu roll repeat_interleave pad constant_pad_nd",
    ),
    "along": OperationKind(
        "nonlinear along dims, which stay, and must be whole",
        "",
        "softmax log_softmax safe_softmax cumprod logcumsumexp argsort",
    ),
    "orders": OperationKind("elements of a whole dim by their size, and their places", "", "sort topk cummax cummin"),
    "takes": OperationKind(
        "some elements of dims, which must be whole", "first", "getitem select slice narrow diagonal unfold"
    ),
    "picks": OperationKind(
        "elements by their numbers, of dims that must be whole",
        "first",
        "index_select index unsafe_index gather embedding",
    ),
    "grows": OperationKind(
        "an array among zeros: the derivative of a part",
        "first",
        "select_backward slice_backward select_scatter slice_scatter embedding_dense_backward",
    ),
    "puts": OperationKind(
        "elements written or added by their numbers",
        "all",
        "index_put index_add index_copy scatter_add scatter",
    ),
    "scores": OperationKind(
        "minus the elements of dim 1 that targets name, and their sum or mean",
        "first",
        "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    ),
    "attends": OperationKind("softmax(Q K) V, of keys that must be whole", "", "scaled_dot_product_attention"),
    "joins": OperationKind(
        "arrays one after another in a dim, which must be whole", "all", "cat concat concatenate stack"
    ),
    "parts": OperationKind(
        "one array as several, cut in a dim, which must be whole",
        "each",
        "split split_with_sizes chunk tensor_split unbind",
    ),
    "zeros": OperationKind("an array of zeros like its operand", "each", "zeros_like zero"),
    "constants": OperationKind("an array of one number like its operand", "", "ones_like full_like"),
    "makes": OperationKind(
        "a new array, which no operand goes into",
        "",
        "arange randperm rand randn randint full ones scalar_tensor eye normal tril_indices linspace logspace zeros "
        "empty empty_strided new_empty new_empty_strided new_zeros new_full new_ones empty_like rand_like randn_like "
        "randint_like bernoulli one_hot uniform exponential fill random",
    ),
    "values": OperationKind(
        "decides by the numbers, or reads them",
        "",
        "item local_scalar_dense tolist numpy nonzero is_nonzero equal allclose masked_select unique bincount contains",
    ),
    "writes": OperationKind("changes its operand", "all", "setitem"),
}
ELEMENTWISE = ("linear", "adds", "multiplies", "divides", "chooses", "nonlinear", "pulls")  # kinds
WHOLE_NUMBERS = 8  # bytes of the integers that are assumed not to wrap around
READERS = ("float", "int", "bool", "index", "complex", "array")  # float(x), or x.__float__(), reads; x.float() converts
_KIND = {name: kind for kind, row in OP_KINDS.items() for name in row.names.split()}

Groups = tuple[tuple[int, ...], ...]  # of operands; one group's members may be partial sums together


def kept_sums(name: str, args: Sequence, kwargs: Mapping, arrays: int, given: Iterable, made: Any) -> Groups:
    """Return the groups of operands whose partial sums a call keeps.

    Args:
        name: the function's name.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        arrays: the number of arguments that are arrays.
        given: the dtypes of the arrays that may be partial sums.
        made: the dtype of the result.
    """
    if rounds(given, made) or adds_number(name, args, kwargs, arrays) or kwargs.get("rounding_mode"):
        return ()
    every, kind = tuple(range(arrays)), op_kind(name)
    if kind == "chooses":
        other = kwargs.get("value", kwargs.get("other", args[2] if len(args) > 2 else None))
        fills = name.strip("_") == "masked_fill"
        if arrays == 3:
            return () if fills else ((1, 2),)
        return ((1 - fills,),) if arrays == 2 and type(other) in (int, float) and other == 0 else ()
    if name.strip("_") == "lerp" and arrays == 3:
        return ((0, 1),)  # the weights may not be partial sums
    groups = {"each": tuple((i,) for i in every), "all": (every,), "first": ((0,),)}
    return groups.get(OP_KINDS[kind].keeps, ()) if kind and arrays else ()


def rounds(given: Iterable, made: Any) -> bool:
    """Return whether a conversion from these dtypes is not linear.

    Fractions are cut off, and whole numbers of less than 64 bits have wrapped around on each device separately: the
    int8 terms 100 and 100 sum to -56, but as float32 to 200.
    """
    if str(made) == "torch.bool":
        return True
    wide = made.is_floating_point or made.is_complex
    for dtype in given:
        if dtype.is_floating_point or dtype.is_complex:
            if not wide:
                return True
        else:
            narrow = str(dtype) != "torch.bool" and dtype.itemsize < WHOLE_NUMBERS and dtype != made
            if narrow and (wide or made.itemsize > dtype.itemsize):
                return True
    return False


def adds_number(name: str, args: Sequence, kwargs: Mapping, arrays: int) -> bool:
    """Return whether a call adds, pads with or writes a number other than zero, since every device would do so."""
    numbers = [*args[2:], kwargs.get("value")] if "pad" in name else []
    if op_kind(name) == "writes":
        numbers = args[2:]
    elif op_kind(name) == "adds" and arrays == 1:
        numbers = [*args[:2], kwargs.get("input"), kwargs.get("other")]
    return any(isinstance(x, (int, float, complex)) and x != 0 for x in numbers)


def function_name(func) -> str:
    """Return a function's name as written, `__add__`; for `x.mT` the attribute's."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def op_kind(name: str) -> str | None:
    """Return the kind of the op with this name (`add`, `__add__`, `_softmax`), or None if the table lacks it."""
    plain = name.strip("_")
    if name.startswith("__") and plain in READERS:
        return "values"
    in_place = plain[1:] if name.startswith("__i") else ""  # x += y
    return _KIND.get(plain) or _KIND.get(in_place) or ("attends" if plain.startswith("scaled_dot_product") else None)
