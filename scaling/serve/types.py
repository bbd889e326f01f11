"""The types of params and caches while a Transformer is served (Part 7, "Distributing Inference").

In serving, Y splits heads and features, Z the cache's batch (or its sequence), and X the model dim. There is no
pipeline. Weights stay, and activations move. The table `scaling.models.leaves` has every leaf split over most axes,
which is the form "2d"; the other forms leave axes out.

Weights may be stored with scales (Part 7, "Tricks"), in one of `scaling.spec.FORMATS`: int8, FP8 or FP4.

    W_in[L, D, F_Y] {Q_D}     "int8" and "fp8-row": W_in.q[L, D, F_Y], W_in.s[L, F_Y]; "mxfp8": W_in.s[L, D/32, F_Y]

Values share scales along the dims that the product with the leaf sums over; in blocks, along the last of these. The
largest error of int8 is 1/254 of the largest value that shares the scale. A leaf is dequantized when its layer is
computed, which saves memory and no time.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.cost.decoding import check_kind
from scaling.models.layer import ONE as ONE
from scaling.models.leaves import KV_HEADS, STACKED, Leaf, check_computed, types_of, without
from scaling.scaled import Scaled
from scaling.scaled import quantize as quantize_line
from scaling.scaled.arrays import scaled_of, shared_positions, wide
from scaling.spec import Format, ShardingError, Spec, format_of, parse, present
from scaling.strategies.transformer.types import check_divided

AXES = {
    "heads": "YZEC",
    "heads_batch": "YZ",
    "sequence": "YZ",
    "2d": "XYZ",
    "experts": "YE",
}  # the axes that a form can use
DROPPED = {
    "heads": "XZ",
    "heads_batch": "X",
    "sequence": "X",
    "2d": "",
    "experts": "XZ",
}  # axes that do not split its matrices
ROWS = {"heads": "B_ZE", "heads_batch": "B_Z", "sequence": "B", "2d": "B_XZ", "experts": "B_E"}  # the cache's batch
FORMS = tuple(AXES)
SPLIT_ROWS = ("heads", "experts")  # x[B_E, T, D] between the blocks is split like the cache


def specs(config: Config, mesh=None, *, form: str = "heads", format: "str | Format | None" = None) -> dict:
    """Return the types of the params, as a tree like the params of `models.transformer`; `tree.shard` takes them.

    - heads: N, F and V over Y. Along Z the weights are replicas, except experts, which are split over E, or over Z if
      the mesh has no E (Part 7, Question 6). Along C, over which prefill splits a prompt, all are replicas.
    - heads_batch and sequence: N, F and V over Y and Z.
    - 2d: N, F and V over Y and Z, and D over X.
    - experts: N and V over Y, whole experts over E and Y, and the shared experts on every rank.

    W_K and W_V have no Y if |Y| does not divide K.

    Args:
        config: The model.
        mesh: The mesh; one device if None.
        form: The form of decoding.
        format: The format of params that were made by `quantize`: their matrices are typed as their parts.

    Raises:
        ShardingError: The form does not use an axis, or a dim does not divide.
    """
    mesh = ONE if mesh is None else mesh
    check_mesh(config, mesh, form)
    check_computed(config)
    heads_whole = KV_HEADS if config.K % mesh.sizes.get("Y", 1) else ()

    def one(name: str, leaf: Leaf) -> str:
        dropped = tuple("XYZ" if form != "2d" and "D_XYZ" in leaf.served else DROPPED[form])
        whole = form == "experts" and {"E", "S"} & {*parse(leaf.served).dim_names}
        spec = parse(without(leaf.served, (*dropped, "Y") if whole or name in heads_whole else dropped))
        return str(present(spec.with_axes("E", experts_axis(mesh, form)) if spec.axes_of("E") else spec, mesh))

    types = types_of(config, one)
    if format is None:
        return types
    f = format_of(format)
    return tree.map(lambda dims, text: _types_of_parts(dims.split(), text, f), shared_of(config, f), types)


def shared_of(config: Config, f: Format) -> dict:
    """Return a tree like the params with the `shared_dims` of each leaf."""
    return types_of(config, lambda name, leaf: shared_dims(name, leaf, f))


def shared_dims(name: str, leaf: Leaf, f: Format) -> str:
    """Return the dims along which a leaf's values share scales: the dims that a product with the leaf contracts.

    A format with blocks has them along the last of these dims. For the embedding it is the product that gives the
    logits. Norms, biases, routers and convolutions have none, because they are not quantized.
    """
    if name == "embed" or name == "router" or name.startswith("conv"):
        return "D" if name == "embed" else ""
    summed = leaf.start if isinstance(leaf.start, str) else ""
    return " ".join(summed[-1:] if f.block else summed)


def _types_of_parts(dims: list[str], text: str, f: Format) -> Any:
    """Return the types of a leaf's parts, as the `Scaled` that has them, or the leaf's type if it is not quantized."""
    if not dims:
        return text
    layers, own = layer_type(text, dims)
    parts = [str(part.stacked(layers) if layers else part) for part in own.parts(f)]
    return scaled_of(parts, f, shared_positions(own))


def layer_type(text: str, dims: list[str]) -> tuple[str, Spec]:
    """Return the dim along which a leaf's layers are stacked, or "", and a layer's type with scales along `dims`."""
    spec = parse(text)
    layers = spec.dim_names[0] if spec.dim_names[0] in STACKED else ""
    return layers, replace(spec, dims=spec.dims[len(layers) :], scaled=tuple(dims))


def experts_axis(mesh, form: str) -> tuple[str, ...]:
    """Return the axes that experts are split over."""
    if form != "heads":
        return ("E", "Y") if form == "experts" else ()
    return ("E",) if mesh.sizes.get("E", 1) > 1 else ("Z",)


def cache_specs(
    config: Config, mesh=None, *, form: str = "heads", page: int | None = None, scaled: bool = False
) -> dict:
    """Return the types of a cache: KV[2, L, B_Z, S, K_Y, H], by form; with a `page`, KV[2, L, P_Z, page, K_Y, H].

    KV[0] has the keys, after rotation, and KV[1] the values. If |Y| does not divide K, the cache has |Y| heads, `R_Y`,
    where head r is a copy of KV head r K / |Y|. lengths[B] has the number of tokens of each row. pages[B, M] has at [b,
    m] the number of the page with row b's tokens m * page to (m + 1) * page - 1, among the pages of the ranks that have
    the row. Both tables are replicated on every rank. A `scaled` cache, of int8 or FP8, has one scale per token and
    head. With latent attention it is KV[I, L, B_Z, S, J, M], with I = J = 1: for each token the latent of its keys and
    values, normed, and the rotary part of its keys, rotated.

    L counts the layers with attention. The l layers with linear attention have a state S[l, B_Z, n_Y, h, v] and
    tail[l, B_Z, t, k_Y, c], the inputs of their convolutions for the last tokens of each row.
    """
    mesh = ONE if mesh is None else mesh
    check_computed(config)
    check_mesh(config, mesh, form)
    if page is not None and form == "sequence":
        raise ShardingError(
            'form="sequence" splits S over Z, which a cache in pages cannot do\n'
            "  fix: give page=None, or choose another form"
        )
    rows, times = ROWS[form], "S_Z" if form == "sequence" else "S"
    if page is not None:
        rows, times = rows.replace("B", "P"), "page"
    heads = "R_Y" if config.K % mesh.sizes.get("Y", 1) else "K_Y"
    held = [cache_type(config, name, rows, times, heads) for name in ("KV", "scale")[: 1 + scaled]]
    held += [f"S[l, {ROWS[form]}, n_Y, h, v]", f"tail[l, {ROWS[form]}, t, k_Y, c]"] if config.linear else []
    types = {parse(text).name: str(present(text, mesh)) for text in held}
    return types | {"lengths": "lengths[B]"} | ({"pages": "pages[B, M]"} if page is not None else {})


def cache_type(config: Config, name: str, rows: str, times: str, heads: str = "K_Y") -> str:
    """Return the type of "KV" or of its "scale". Latents are one tensor with one head, whole on every rank."""
    lead, heads, width = ("I", "J", "M") if config.latent else ("2", heads, "H")
    return f"{name}[{lead}, L, {rows}, {times}, {heads}{', ' + width if name == 'KV' else ''}]"


def check_mesh(config: Config, mesh, form: str) -> None:
    """Check that the form is one of `FORMS`, uses the mesh's axes, and divides the model; else ShardingError."""
    if form not in FORMS:
        raise ShardingError(f"unknown form {form!r} of decoding\n  fix: choose one of {', '.join(FORMS)}")
    real = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    check_kind(form, config)
    if config.linear and "C" in real:
        raise ShardingError(
            f"{config.name}: linear layers are not served over C={real['C']}\n  rule: a prompt of theirs is not split\n"
            "  fix: give the ranks of C to Y or Z"
        )
    if unknown := [axis for axis in real if axis not in AXES[form]]:
        raise ShardingError(
            f'{config.name}: mesh axis {unknown[0]} splits nothing in the form "{form}"\n'
            f"  rule: its axes are {', '.join(AXES[form])}\n  fix: rename the axis, or choose another form"
        )
    X, Y, Z, E = (real.get(axis, 1) for axis in "XYZE")
    linear = [("k", config.linear.keys, Y, "heads of linear layers")] if config.linear else []
    parts = Y if form in SPLIT_ROWS else Y * Z
    wanted = [("N", config.N, parts, "query heads"), ("V", config.V, parts, "vocabulary entries")]
    wanted += [("F", config.F, parts, "features")] if form != "experts" else []
    wanted += [("F_dense", config.F_dense, parts, "features of dense layers")] if config.dense_layers else []
    wanted += [("D", config.D, X * Y * Z, "model dims")] if form == "2d" else []
    if config.moe:
        experts = experts_axis(mesh, form)
        wanted += [("E", config.E, mesh.size([a for a in experts if a in real]), "experts")]
    elif form == "experts":
        raise ShardingError(f'{config.name}: the form "experts", of a model without\n  fix: choose form="heads"')
    elif E > 1:
        raise ShardingError(
            f"{config.name}: mesh axis E splits experts, but the model has none\n  fix: rename the axis Z"
        )
    check_divided(config, Y, wanted + linear)


def quantize(params: dict, config: Config, format: str = "int8", *, mesh=None, form: str = "heads") -> dict:
    """Return this rank's params with each matrix as a `Scaled`, typed as `specs(config, mesh, form=form, format=...)`.

    Whole params that are quantized and then sharded are the same to the bit as shards that are quantized.

    Args:
        params: This rank's params, typed as `specs(config, mesh, form=form)`.
        config: The model.
        format: The format's name.
        mesh: The mesh, or None for one device.
        form: How the params are sharded.

    Raises:
        ValueError: A matrix has numbers that are not finite in float32, or a leaf is no tensor of floats.
        ShardingError: A leaf is not of its type, or a shard or the end of a dim would cut a block of the format.
    """
    stored = quantizers(config, format, mesh, form)
    tree.check(params, specs(config, mesh, form=form), config.sizes, ONE if mesh is None else mesh)
    tree.check_floats(params)
    return tree.map(lambda quantizer, W: quantizer(W), stored, params)


def quantizers(config: Config, format: str, mesh=None, form: str = "heads") -> dict:
    """Return a tree like the params, whose leaves are the functions by which `quantize` stores each."""
    f, on = format_of(format), ONE if mesh is None else mesh
    if not config.norm_gain:
        what = f"{config.name}: has norms without gains, so no param would say in which dtype it is computed"
        raise ValueError(f"{what}\n  fix: serve its weights as they are")
    types = specs(config, mesh, form=form)
    return tree.map(lambda dims, text: _quantizer(dims.split(), text, f, on), shared_of(config, f), types)


def _quantizer(dims: list[str], text: str, f: Format, mesh) -> Callable[[Tensor], Any]:
    """Return the function that stores a leaf of this type, whose values share scales along these dims."""
    if not dims:
        return lambda W: W
    stacked, spec = layer_type(text, dims)
    line = f"{replace(spec, scaled=())} -> {spec}"

    def store(W: Tensor) -> Scaled:
        if not W.is_meta and not bool(torch.isfinite(W.to(torch.float32)).all()):
            what = f"{text}: what is not finite in float32 has no {f.name} form"
            raise ValueError(f"{what}\n  fix: look for NaN, inf and numbers above 3.4e38 in it")
        if not stacked:
            return quantize_line(line, W, mesh, f)
        layers = [quantize_line(line, part, mesh, f) for part in W.unbind()]
        return layers[0].of([torch.stack(parts) for parts in zip(*(layer.parts for layer in layers), strict=True)])

    return store


def plain_leaf(params: dict) -> Tensor:
    """Return a param without scales, which has the dtype and the device of the computation."""
    return params["norm"] if "norm" in params else params["embed"]


def lay_out_by_output(params: dict, config: Config) -> dict:
    """Return a copy of the params in which the elements that one output sums over are adjacent in memory.

    Types, shapes and values stay; only strides change. The product of one row then reads a matrix in the order of
    memory. Leaves with scales are dequantized in each step, so they are not copied.
    """

    def laid_out(dims: str, text: str, W: Any) -> Any:
        if isinstance(W, Scaled) or not dims:
            return W
        last = [parse(text).index(dim) for dim in dims.split()]
        order = [i for i in range(W.dim()) if i not in last] + last
        return W.permute(order).contiguous().permute([order.index(i) for i in range(W.dim())])

    return tree.map(laid_out, shared_of(config, format_of("fp8-row")), specs(config), params)


def check_dtypes(params: Any) -> None:
    """Raise ValueError, which names the leaf, unless each has the dtypes that `quantize` gives it."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Scaled)

    for i, x in enumerate(optree.tree_leaves(params, is_leaf=is_leaf)):
        if not (x.has_dtypes if isinstance(x, Scaled) else x.dtype in tree.FLOATS):
            at = optree.tree_accessors(params, is_leaf=is_leaf)[i]
            dtypes = ", ".join(str(part.dtype) for part in (x.parts if isinstance(x, Scaled) else (x,)))
            what = f"{at.codify('params')} is in {dtypes}: not what quantize returns".replace("'", '"')
            raise ValueError(f"{what}\n  fix: convert params before they are quantized, not after it")


def floats(params: Any, dtype: torch.dtype) -> Any:
    """Return a layer's params, or a leaf, with the leaves that have scales dequantized."""
    if isinstance(params, dict):
        return {name: floats(leaf, dtype) for name, leaf in params.items()}
    return wide(replace(params, dtype=dtype)).to(dtype) if isinstance(params, Scaled) else params
