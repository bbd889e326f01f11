"""Arrays that carry their type (Part 10, explicit mode): `x.type` is `float32[8_X, 2_Y]`.

    x = array(torch.arange(16.0).view(8, 2), "[8_X, 2_Y]", mesh)
    (x * 2).type                                     float32[8_X, 2_Y]
    torch.einsum("bd,df->bf", In, W).type            bfloat16[8_X, 8192] {U_Y}: nothing was sent

torch's functions, operators and methods take them and derive the type of the result. None sends anything. A call whose
result has no type is refused, and the error names the cheapest line that makes it legal: a `reshard`, or `out=` of
`einsum`, `matmul`, `sum`, `mean`, `amax`, `reshape`, `broadcast_to` and `take`. With `out`, which is JAX's
`out_sharding`, operands and result are resharded by the cheapest lines, also if the operation alone would be refused.
These functions take plain tensors, of one device, too.
"""

import builtins
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, layout, letters, retyped, spec_of, unsplit_spec
from scaling.algebra.resharding import reshard as plan_reshard
from scaling.algebra.steps import Plan
from scaling.collectives.plans import run as run_plan
from scaling.common.torch_private import note_shard
from scaling.explicit.functions import LocalPlan, Node, each_call, legal_layouts, nodes_of, read_call, way_to
from scaling.spec import ShardingError, Spec
from scaling.spec.reader import read_type


class Array:
    """A whole array by its shard on this device: `.local`, `.type`, `.shape` and `.dtype` (the whole's), `.mesh`."""

    def __init__(self, local: Tensor, layout: DimAxes, shape: Sequence[int], mesh):
        self.local, self.layout, self.shape, self.mesh = local, layout, torch.Size(shape), mesh
        spec = spec_of(layout)
        if tuple(local.shape) != (wanted := spec.local_shape(tuple(shape), mesh)):
            raise ShardingError(
                f"{self.type}: a shard of shape {wanted} on each device; got {tuple(local.shape)}"
                "\n  fix: give this device's shard, of that shape"
            )
        note_shard(local, spec, mesh)

    @property
    def type(self) -> str:
        """The array's type as text, `float32[8_X, 2_Y]`."""
        return type_text(self.layout, self.shape, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.local.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def size(self, dim: int | None = None):
        """Return the whole array's shape, or its size along a dim."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements of the whole array."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return self.type

    def whole(self) -> Tensor:
        """Return the whole array, which is gathered on every device."""
        return reshard(self, DimAxes(((),) * self.ndim)).local

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call_typed(func, args, kwargs or {})

    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"an Array has no attribute {name!r}")
        method = getattr(Tensor, name)
        if not callable(method):  # x.T, x.mT
            return call_typed(method.__get__, (self,), {})
        return lambda *args, **kwargs: call_typed(method, (self, *args), kwargs)


def _operator(name: str):
    method = getattr(Tensor, name)
    return lambda self, *args: call_typed(method, (self, *args), {})


OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul neg abs getitem eq ne lt le gt ge and "
OPERATORS += "or invert bool float int index array"  # the last ones are refused
for _name in OPERATORS.split():
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
Array.__hash__ = object.__hash__


def type_text(at: DimAxes, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return the type as text: `float32[8_X, 2_Y] {U_Z}`."""
    return str(retyped(unsplit_spec(dtype_name(dtype), map(str, shape)), at))


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return a dtype's name, `float32`."""
    return str(dtype).removeprefix("torch.")


def read_array_type(
    text: "str | Spec | DimAxes", shape: Sequence[int], mesh, dtype: torch.dtype | None = None
) -> DimAxes:
    """Return the layout of a type that is read as by `array_spec`; a layout is returned unchanged."""
    return text if isinstance(text, DimAxes) else layout(array_spec(text, shape, mesh, dtype))


def array_spec(
    text: str | Spec, shape: Sequence[int], mesh, dtype: torch.dtype | None = None, dims: Sequence[str] = ()
) -> Spec:
    """Read a type from text: `[8_X, 2_Y]`, `float32[8_X, 2_Y]`, or with names of dims, `In[B_X, D_Y] {U_Z}`.

    Args:
        text: the type.
        shape: the whole array's shape.
        mesh: the mesh, or None.
        dtype: the array's dtype, if it is to be compared.
        dims: names for the dims of a type that has sizes instead of names.

    Raises:
        ShardingError: the type has other dims than the shape, another dtype, or dims that do not divide over their axes
            (if there is a mesh).
    """
    if not isinstance(text, (str, Spec)):
        kind = type(text).__name__
        raise ShardingError(
            f"a type of an array is a text, [8_X, 2_Y]; got a {kind}\n  fix: name each dim's size and axes"
        )
    written = Spec(*read_type(str(text), repeats=True))
    if len(written.dims) != len(shape):
        what = f"{text}: {len(written.dims)} dims, but the array has shape {tuple(shape)}"
        raise ShardingError(f"{what}\n  fix: name each dim")
    for dim, size in zip(written.dim_names, shape, strict=True):
        if dim.isdigit() and int(dim) != size:
            raise ShardingError(
                f"{text}: says {dim} where the array, of shape {tuple(shape)}, has {size}\n"
                f"  rule: a type has the whole array's sizes, not one device's\n  fix: write {size} there"
            )
    of_dtype = isinstance(getattr(torch, written.name or "_", None), torch.dtype)
    if of_dtype and dtype is not None and written.name != dtype_name(dtype):
        fix = f"convert it, x.to(torch.{written.name})"
        raise ShardingError(f"{text}: the array is {dtype_name(dtype)}\n  fix: {fix}")
    if mesh is not None:
        written.local_shape(tuple(shape), mesh)
    sized = any(dim.isdigit() for dim in written.dim_names)
    own = (dims or letters(len(shape))) if sized else written.dim_names
    return retyped(unsplit_spec("" if of_dtype else written.name, own), layout(written))


def array(x: Tensor, type: "str | Spec | DimAxes", mesh) -> Array:
    """Make an array of this type from the whole tensor x, which every device has: each device keeps its part.

    If the type is unreduced, `{U_X}`, the first device along X holds x and the others hold zeros. On an AbstractMesh
    only the shape of x is used. Raises ShardingError as `array_spec` does.
    """
    if builtins.type(x) is Array or not isinstance(x, Tensor) or x.layout is not torch.strided:
        what = f"array({x!r:.40}): a {builtins.type(x).__name__}"
        fix = "reshard(x, type) changes an Array's type; torch.as_tensor(x) makes a tensor"
        raise ShardingError(f"{what}\n  rule: what becomes an array is a dense tensor\n  fix: {fix}")
    if not hasattr(mesh, "device"):
        raise ShardingError(f"array(x, {type!r}, {mesh!r:.40}): on no mesh\n  fix: give a Mesh or an AbstractMesh")
    layout = read_array_type(type, x.shape, mesh, x.dtype)
    if x.device.type != mesh.device.type and not (mesh.device.type == "meta"):
        raise ShardingError(f"array: x is on {x.device}\n  rule: the mesh's is {mesh.device}\n  fix: x.to(mesh.device)")
    x = x.to("meta") if mesh.device.type == "meta" else x
    made = reshard(Array(x, DimAxes(((),) * x.dim()), x.shape, mesh), layout)
    return Array(x.clone(), layout, x.shape, mesh) if made.local is x else made


def reshard(x: Any, type: "str | Spec | DimAxes") -> Any:
    """Change an array's type by the cheapest collectives, as planned.

    This is JAX's `reshard`, and in auto mode its `with_sharding_constraint`. A plain tensor, which is whole, is
    returned unchanged.
    """
    if not isinstance(x, Array):
        if has_torch_function((x,)):
            return handle_torch_function(reshard, (x,), x, type)
        return _plain(x, type)
    layout = read_array_type(type, x.shape, x.mesh, x.dtype)
    if layout == x.layout:
        return x
    return Array(run_plan(plan_change(x, layout), x.local, x.mesh), layout, x.shape, x.mesh)


def plan_change(x: Array, to: DimAxes) -> Plan:
    """Plan the collectives that bring an array into a layout."""
    return plan_reshard(spec_of(x.layout), spec_of(to), tuple(x.shape), x.mesh, idle=True)


def _plain(x: Any, type: "str | Spec | DimAxes") -> Tensor:
    """Return a plain tensor, which is whole, if it fits the type's dims, sizes and dtype; else raise ShardingError."""
    if not isinstance(x, Tensor):
        what = f"reshard({x!r:.40}): a {builtins.type(x).__name__}"
        raise ShardingError(f"{what}\n  rule: what has a type is an Array, or whole\n  fix: torch.as_tensor(x)")
    if not isinstance(type, DimAxes):
        read_array_type(type, x.shape, None, x.dtype)
    return x


def call_typed(func, args: tuple, kwargs: dict, out: "str | Spec | None" = None) -> Any:
    """Call a torch function on arrays; return an array, or a tuple of arrays if the function gives several.

    Args:
        func: the torch function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        out: the result's type, for which operands and result are resharded.

    Raises:
        ShardingError: the result has no type. The error names the rule and the cheapest legal line.
    """
    return each_call(lambda call: _one_result(call, out), read_call(func, args, kwargs, _is_array))


def _is_array(x) -> bool:
    return isinstance(x, Array)


def _one_result(made: Node, out: "str | Spec | None") -> Array:
    mesh, layouts = _mesh(made), [x.layout for x in made.operands]
    shapes = [tuple(x.shape) for x in made.operands]
    try:
        wanted = None if out is None else read_array_type(out, made.shape, mesh, made.dtype)
        if wanted is None:
            needed, result = made.op.infer(layouts, shapes, mesh.sizes)
        else:
            needed, result, _ = way_to(nodes_of(made), tuple(layouts), wanted, tuple(mesh.sizes.items()))
    except Illegal as error:
        raise ShardingError(_refusal(made, layouts, mesh, error)) from None
    shards = [reshard(x, at).local for x, at in zip(made.operands, needed, strict=True)]
    local = LocalPlan(needed, result, spec_of(result).local_shape(made.shape, mesh))
    computed = Array(made.run(made.op, shards, local), result, made.shape, mesh)
    return computed if wanted is None else reshard(computed, wanted)


def _mesh(made: Node):
    mesh = made.operands[0].mesh
    if any(x.mesh is not mesh for x in made.operands):
        raise ShardingError(f"{made.op.name}: the arrays are on two meshes\n  fix: make all of them on one mesh")
    return mesh


def _refusal(made: Node, layouts: Sequence[DimAxes], mesh, error: Illegal) -> str:
    """Return the text of an error: the line, the mistake, the rule, and the cheapest line that makes it legal."""
    types = [type_text(at, x.shape, x.dtype) for at, x in zip(layouts, made.operands, strict=True)]
    legal, fixes = legal_layouts(made.op, nodes_of(made)[:-1], layouts, mesh.sizes), []
    for number, (x, was, now) in enumerate(zip(made.operands, layouts, legal.needed, strict=True), 1):
        if was != now:
            change = plan_change(x, now)
            ops = ", ".join(f"{step.op}_{''.join(step.axes)}" for step in change.steps)
            nbytes = change.wire_bytes(tuple(x.shape), mesh, x.dtype.itemsize)
            which = "it" if len(layouts) == 1 else f"operand {number}"
            fixes.append(f'reshard({which}, "{type_text(now, x.shape, x.dtype)}"), {ops}: {nbytes:,.0f} bytes sent')
    gives = type_text(legal.result, made.shape, made.dtype)
    return (
        f"{made.op.name}: {' * '.join(types)}\n  {error.what}\n  rule: {error.rule}\n"
        f"  fix: {'; '.join(fixes)}; the result is {gives}; or give out=, the result's type"
    )


def _with_out(func: Callable) -> Callable[..., Any]:
    """Return a torch function with one more argument, `out`, the result's type."""

    @wraps(func)
    def call(*args: Any, out: str | Spec | None = None, **kwargs: Any) -> Any:
        if any(isinstance(x, Array) for x in args):
            return call_typed(func, args, kwargs, out)
        result = func(*args, **kwargs)
        return result if out is None else reshard(result, out)

    return call


einsum, matmul, sum, mean = map(_with_out, (torch.einsum, torch.matmul, torch.sum, torch.mean))
amax, reshape, broadcast_to = map(_with_out, (torch.amax, torch.reshape, torch.broadcast_to))
_index_select = _with_out(torch.index_select)


def take(x, index, dim: int = 0, out: str | Spec | None = None):
    """Pick elements of a dim, which must be whole unless `out` is given, at the indices index[N]: [..., N, ...]."""
    return _index_select(x, dim, index, out=out)
