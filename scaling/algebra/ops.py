"""The table of torch's ops: what each does to the dims of the arrays that it is given. Names as data; no torch.

A name is that of the function, the method or the aten op, without underscores at its ends: `add` stands for
`torch.add`, `x.__add__` and `aten.add_.Tensor`; `op_kind` gives a name's kind. An op that no line has is unknown:
whoever asks refuses it by its name and does not guess.

| kind       | what it does                                                     | keeps the partial sums |
|------------|------------------------------------------------------------------|------------------------|
| linear     | one array, element by element                                    | of its operand         |
| adds       | elements that meet are added                                     | if all have the same   |
| multiplies | elements that meet are multiplied                                | of one operand         |
| divides    | elements that meet are divided                                   | of the first           |
| nonlinear  | elements that meet, in another way                               | none                   |
| sums       | sums over dims, which go; a split one leaves a partial sum       | of its operand         |
| reduces    | dims go in another way: each must be whole                       | none                   |
| contracts  | products summed over dims that the operands share                | of one operand         |
| fuses      | the first operand plus a contraction of the others               | none                   |
| permutes   | the same elements, the dims in another order                     | of its operand         |
| reshapes   | the same elements in the same order, dims split and merged       | of its operand         |
| broadcasts | new dims, and dims of one element, hold copies                   | of its operand         |
| scans      | linear along dims, which stay, and must be whole                 | of its operand         |
| along      | nonlinear along dims, which stay, and must be whole              | none                   |
| takes      | some elements of dims, which must be whole                       | of the first           |
| joins      | arrays one after another in a dim, which must be whole           | if all have the same   |
| parts      | one array as several, cut in a dim, which must be whole          | of its operand         |
| orders     | elements of a whole dim by their size, and their places          | none                   |
| zeros      | an array of zeros like its operand                               | of its operand         |
| constants  | an array of one number like its operand                          | none                   |
| values     | decides by the numbers, or reads them                            | none                   |
| writes     | changes its operand                                              | none                   |
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS = {
    "linear": (
        "neg negative positive clone contiguous detach alias float double half bfloat16 to to_copy type real imag "
        "conj lift_fresh"
    ),
    "adds": "add radd sub rsub subtract lerp",
    "multiplies": "mul rmul multiply",
    "divides": "div divide truediv true_divide",
    "nonlinear": (
        "exp exp2 log log2 log10 log1p expm1 relu gelu silu mish sigmoid logsigmoid tanh sinh cosh sqrt rsqrt square "
        "abs cos sin tan atan atan2 asin acos reciprocal erf erfc clamp clip clamp_min clamp_max pow rpow softplus "
        "elu leaky_relu relu6 hardtanh hardswish selu maximum minimum fmax fmin where masked_fill eq ne lt le gt ge "
        "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor remainder fmod "
        "floor ceil round trunc floor_divide sign sgn isfinite isnan isinf invert and or xor nan_to_num threshold "
        "rdiv rtruediv gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward int bool "
        "long short xlogy logaddexp ldexp frexp softmax_backward_data log_softmax_backward_data"
    ),
    "sums": "sum mean",
    "reduces": "amax amin max min prod any all logsumexp argmax argmin var std norm linalg_vector_norm",
    "contracts": "einsum matmul rmatmul mm bmm mv dot tensordot",
    "fuses": "addmm baddbmm addbmm addmv linear",
    "permutes": "permute transpose swapaxes swapdims t T mT movedim moveaxis numpy_T",
    "reshapes": ("reshape view unsafe_view reshape_alias flatten unflatten squeeze unsqueeze view_as reshape_as ravel"),
    "broadcasts": "expand broadcast_to",
    "scans": "cumsum flip tril triu roll repeat_interleave pad constant_pad_nd",
    "along": "softmax log_softmax safe_softmax cumprod logcumsumexp argsort",
    "takes": "getitem select slice narrow index_select index diagonal",
    "joins": "cat concat concatenate stack",
    "parts": "split split_with_sizes chunk tensor_split unbind",
    "orders": "sort topk cummax cummin",
    "zeros": "zeros_like",
    "constants": "ones_like full_like",
    "values": (
        "item local_scalar_dense tolist numpy nonzero is_nonzero equal allclose masked_select unique bincount contains"
    ),
    "writes": "setitem",
}
ELEMENTWISE = ("linear", "adds", "multiplies", "divides", "nonlinear")  # kinds
SUMS = {  # the last column, as LabelledOp.linear has it
    "each": "linear multiplies sums contracts permutes broadcasts scans parts zeros",
    "all": "adds joins",
    "first": "divides takes",
}
KEEPS_SUMS = {kind: whose for whose, kinds in SUMS.items() for kind in kinds.split()}
WHOLE_NUMBERS = 8  # bytes of whole numbers that are taken not to wrap around
READERS = ("float", "int", "bool", "index", "complex", "array")  # float(x), x.__float__(), reads; x.float() converts
_KIND = {name: kind for kind, names in KINDS.items() for name in names.split()}


def keeps_sums(name: str, args: Sequence, kwargs: Mapping, arrays: int, given: Iterable, made: Any) -> str:
    """Return whose partial sums a call keeps, as `LabelledOp.linear` has it.

    Args:
        arrays: how many of the arguments are arrays.
        given: the dtypes of those that may be partial sums.
        made: the dtype of the result.
    """
    cut = rounds(given, made) or adds_number(name, args, kwargs, arrays) or kwargs.get("rounding_mode")
    cut = cut or (name == "lerp" and arrays > 2)  # whose weights are multiplied
    return "" if cut else KEEPS_SUMS.get(op_kind(name) or "", "")


def rounds(given: Iterable, made: Any) -> bool:
    """Return whether a conversion from these dtypes is not linear.

    Fractions are cut off, and whole numbers of less than 64 bits have wrapped around, each device's by itself: int8
    terms 100 and 100 are -56, and as float32 200.
    """
    if str(made) == "torch.bool":
        return True
    wide = made.is_floating_point or made.is_complex
    for dtype in given:
        if dtype.is_floating_point or dtype.is_complex:
            if not wide:
                return True
        elif dtype.itemsize < WHOLE_NUMBERS and dtype != made and (wide or made.itemsize > dtype.itemsize):
            return True
    return False


def adds_number(name: str, args: Sequence, kwargs: Mapping, arrays: int) -> bool:
    """Return whether a call adds a number to an array, or pads it with one, that is not zero: each device would."""
    numbers = [*args[2:], kwargs.get("value")] if "pad" in name else []
    if op_kind(name) == "adds" and arrays == 1:
        numbers = [*args[:2], kwargs.get("input"), kwargs.get("other")]
    return any(isinstance(x, (int, float, complex)) and x != 0 for x in numbers)


def names_of(*kinds: str) -> frozenset[str]:
    """Return the names of some kinds."""
    return frozenset(name for kind in kinds for name in KINDS[kind].split())


def function_name(func) -> str:
    """Return a function's name as it is written, `__add__`; for `x.mT` the attribute's."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def op_kind(name: str) -> str | None:
    """Return the kind of the op with this name (`add`, `__add__`, `_softmax`), or None if the table lacks it."""
    plain = name.strip("_")
    if name.startswith("__") and plain in READERS:
        return "values"
    in_place = plain[1:] if name.startswith("__i") else ""  # x += y
    return _KIND.get(plain) or _KIND.get(in_place)
