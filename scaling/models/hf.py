"""Hugging Face checkpoints: a folder of config.json and safetensors files, read and written whole or by shards.

`load` and `save` hold the whole model. `load_sharded` reads only the data of this rank's shards, and `save_sharded`
gathers one layer at a time. Errors name a tensor that is missing, left over or misshaped. Needs safetensors, of the
extra `hf`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import unshard
from scaling.common.lazy import needing
from scaling.configs import Config
from scaling.configs import load as load_config
from scaling.configs.hugging_face_write import write_config as table_of
from scaling.configs.model_types import experts_packed, weight_blocks
from scaling.mesh import AbstractMesh
from scaling.models.hf_layout import (
    BLOCKS,
    EXPONENTS,
    FileLayout,
    PackedSlice,
    ScaledSlice,
    is_scale,
    layer_numbers,
    leaf_layouts,
    scale_of,
)
from scaling.models.leaves import STACKS, specs_of
from scaling.models.params import IN_ORDER, Places, places_of, stored_sizes
from scaling.models.pointwise import XIELU
from scaling.spec import Spec, parse

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SINGLE_BYTES = 5_000_000_000  # a larger model is written as one file per layer
HEAD = "lm_head.weight"
MOST_MISSING = 1_000_000  # with more missing tensors than these, only their number is reported
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
ROUTER_BIAS = "e_score_correction_bias"
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # older files store these, computed here
BARE, BODY = "wte.weight", "transformer."  # a tensor of a GPT-2 whose names lack this prefix, as in the published files
DRAFT = "mtp."  # layers that draft further tokens, which transformers' classes leave out, too
TensorParts = dict[str, dict[int, tuple[FileLayout, Tensor]]]  # the params of each tensor, by their places in it


def load(folder: "str | Path", dtype: torch.dtype | None = None) -> tuple[Config, dict]:
    """Read a folder and return (config, params), whole and on the CPU, in `dtype` or, with None, in the files' dtype.

    Where the files' dtypes differ, the params have the smallest one that holds them all. Only the bias of a
    router's choices keeps its own dtype, as it does in transformers.

    Raises:
        ValueError: A model that is not computed here, or tensors that are missing, left over or misshaped.
    """
    return load_sharded(folder, None, AbstractMesh({}), dtype, "cpu")


def load_sharded(
    folder: "str | Path",
    specs: dict | None,
    mesh,
    dtype: torch.dtype | None = None,
    device: "torch.device | str | None" = None,
    *,
    places: Places = IN_ORDER,
    stored: dict | None = None,
) -> tuple[Config, dict]:
    """Read (config, params) as `load` does, but only this rank's shards by `specs` (None: whole params).

    The rest of the files is not read. `places` is as in `models.transformer.init`. `stored` is a tree like the params
    of functions, by which each leaf is stored once it is read (`serve.types.quantizers`).
    """
    folder = Path(folder)
    config = _config(folder)
    layouts, whole = leaf_layouts(config), specs_of(config)
    sizes, slots = stored_sizes(config, places), places.get("L", range(config.sizes["L"]))
    files = _Files(folder)
    files.check(layouts, config)
    dtypes = files.dtypes(layouts, config) if dtype is None else tree.map(lambda layout: dtype, layouts)
    device = torch.device(mesh.device if device is None else device)

    def leaf(spec: Spec, layout: FileLayout, kept: torch.dtype) -> Tensor:
        ranges = dict(zip(spec.dim_names, spec.slices(sizes, mesh, mesh.coord), strict=True))
        real = {dim: tree.unpadded(held, config.V) if dim == "V" else held for dim, held in ranges.items()}
        made: Any = None
        for at in layout.indices(ranges):
            there = at | ({"L": slots[at["L"]]} if "L" in at else {})
            if there.get("L", 0) < 0:
                continue
            part = layout.read(files[layout.tensor(there)], real, sizes)
            if made is None:
                made = torch.zeros(spec.local_shape(sizes, mesh), dtype=kept, device=device)
            made[tuple(i - ranges[dim].start for dim, i in at.items())][tuple(map(slice, part.shape))] = part
        return made

    types = tree.map(parse, whole if specs is None else specs)
    tree.paired(types, whole, "specs")  # refuses specs of another structure
    if stored is None:
        return config, tree.map(leaf, types, layouts, dtypes)
    return config, tree.map(lambda store, *read: store(leaf(*read)), stored, types, layouts, dtypes)


def save(folder: "str | Path", config: Config, params: dict) -> None:
    """Write config.json and the tensors, in one file, or beyond 5 GB in one per layer, bit for bit."""
    save_sharded(folder, config, params, specs_of(config), AbstractMesh({}), tree.nbytes(params) <= SINGLE_BYTES)


def save_sharded(
    folder: "str | Path",
    config: Config,
    params: dict,
    specs: dict,
    mesh,
    single: bool = False,
    *,
    places: Places = IN_ORDER,
) -> None:
    """Write a checkpoint from this rank's shards, called by all ranks.

    It has a file for the ends and one for each layer, or a single file. Where L is split over an axis (the stages of a
    pipeline), each stage's first rank writes its layers. `places` is as in `load_sharded`; the padding is not written.
    """
    folder, table = Path(folder), table_of(config)
    types = tree.map(parse, specs)
    slots = places.get("L", range(config.sizes["L"]))
    tree.check(params, types, stored_sizes(config, places), mesh)
    parts = config.L + 1
    names = [SINGLE] if single else [f"model-{i:05}-of-{parts:05}.safetensors" for i in range(1, parts + 1)]
    if stale := {path.name for path in folder.glob("model*.safetensors*")} - {*names, *([] if single else [INDEX])}:
        raise ValueError(f"{folder}: holds another checkpoint, {min(stale)}\n  fix: give a folder without one")
    folder.mkdir(parents=True, exist_ok=True)

    stages = types["layers"]["W_O"].axes_of("L")
    leads = all(at == 0 for axis, at in mesh.coord.items() if axis not in stages)
    held = {}
    for number, part in _parts(params, types, leaf_layouts(config), config, mesh, slots):
        staged = number > 0 and config.kinds[number - 1] != "dense"  # all stages hold the ends and the dense layers
        if not leads or (mesh.rank != 0 and not staged):
            continue
        held |= part | {
            name: torch.tensor(value, dtype=params["embed"].dtype)
            for name, (home, value) in _constants(config).items()
            if home == number
        }
        if not single:
            _write(folder / names[number], held)
            held = {}
    if single:
        _write(folder / SINGLE, held)
    if mesh.rank == 0:
        table["torch_dtype"] = str(params["embed"].dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(table, indent=2) + "\n")
        if not single:
            (folder / INDEX).write_text(json.dumps(_index(config, names, params["embed"].itemsize), indent=2) + "\n")
    if mesh.size() > 1:  # no rank continues before all have written
        unshard(str(Spec("Done", (), tuple(sorted(mesh.sizes)))), torch.zeros((), device=mesh.device), mesh)


def _parts(
    params: dict, types: dict, layouts: dict, config: Config, mesh, slots: Sequence[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (0, the tensors of the ends), then (l + 1, layer l's) of the layers that this rank holds a part of.

    Each tensor is gathered whole.
    """

    def add(pieces: TensorParts, leaf: Tensor, spec: Spec, layout: FileLayout, at: dict[str, int]) -> None:
        leaf = leaf.detach().contiguous()
        leaf = (unshard(str(spec), leaf, mesh) if spec.axes else leaf).cpu()
        leaf = leaf[tuple(slice(config.V if dim == "V" else None) for dim in spec.dim_names)]
        rest = [dim for dim in layout.numbered if dim not in at]
        for inner in layout.indices({dim: slice(0, config.sizes[dim]) for dim in rest}):
            parts = pieces.setdefault(layout.tensor(at | inner), {})
            parts[layout.part] = layout, layout.write(leaf[tuple(inner.values())])

    def whole(pieces: TensorParts) -> dict[str, Tensor]:
        found = {name: [own[i] for i in sorted(own)] for name, own in pieces.items()}
        return {name: own[0][0].join([part for _, part in own], config.sizes) for name, own in found.items()}

    ends: TensorParts = {}
    each = (tree.leaves({n: some[n] for n in params if n not in STACKS}) for some in (params, types, layouts))
    for leaf, spec, layout in zip(*each, strict=True):
        add(ends, leaf, spec, layout, {})
    yield 0, whole(ends)
    mine = places_of(types, slots, mesh)
    held = [("layers", {"L": slots[i]}, i - mine.start) for i in mine if slots[i] >= 0]
    others = (("dense", "G"), ("linear", "l"))
    held += [(stack, {dim: i}, i) for stack, dim in others if stack in params for i in range(config.sizes[dim])]
    for stack, at, place in held:
        layer: TensorParts = {}
        each = (tree.leaves(some[stack]) for some in (params, types, layouts))
        for stacked, spec, layout in zip(*each, strict=True):
            add(layer, stacked[place], Spec("W", spec.dims[1:]), layout, at)
        yield file_number(config, at), whole(layer)


def file_number(config: Config, at: Mapping[str, int]) -> int:
    """Return the number of a tensor's file, given its indices: l + 1 in layer l of the model, and 0 at the ends."""
    return next((layers[at[dim]] + 1 for dim, layers in layer_numbers(config).items() if dim in at), 0)


def safetensors() -> Any:
    """Import the library safetensors and return it. Raise a ValueError if it is not installed."""
    with needing("a Hugging Face folder", "hf"):
        import safetensors.torch
    return safetensors


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors().torch.save_file(tensors, path, metadata={"format": "pt"})


def _index(config: Config, names: list[str], itemsize: int) -> dict:
    """Return the index of a checkpoint in many files, which maps each tensor to its file."""
    where, size = {}, 0
    for layout in tree.leaves(leaf_layouts(config)):
        for at in layout.indices({dim: slice(0, config.sizes[dim]) for dim in layout.numbered}):
            where[layout.tensor(at)] = names[file_number(config, at)]
            size += itemsize * math.prod(layout.shape(config.sizes))
    for name, (home, _) in _constants(config).items():
        where[name], size = names[home], size + itemsize
    return {"metadata": {"total_size": size}, "weight_map": where}


def _constants(config: Config) -> dict[str, tuple[int, float]]:
    """Return the tensors of the files that are no params, each with its file's number and its value."""
    found = {}
    for l in range(config.L if config.activation == "xielu" else 0):
        home = file_number(config, {"L": l})
        found |= {f"model.layers.{l}.mlp.act_fn.{name}": (home, value) for name, value in XIELU.items()}
    return found


def _config(folder: Path) -> Config:
    """Read the config of a folder, and name it after the folder."""
    if not (folder / "config.json").exists():
        fix = "give a folder that holds a config.json and .safetensors"
        raise ValueError(f"{folder}: has no config.json\n  fix: {fix}")
    return load_config(folder / "config.json").with_(name=folder.name)


class _Files:
    """The tensors of a folder by name, as slices of its open files."""

    def __init__(self, folder: Path):
        self.folder, self.open = folder, {}
        quantized = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
        self.blocks, self.packed = weight_blocks(quantized), experts_packed(quantized)
        if (folder / INDEX).exists():
            self.file_of = json.loads((folder / INDEX).read_text())["weight_map"]
            names = sorted(set(self.file_of.values()))
        else:
            names = [SINGLE]
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        for name in names:
            self._file(name)
        listed = {(tensor, name) for tensor, name in self.file_of.items()}
        found = {(tensor, name) for name in names for tensor in self.open[name].keys()}  # noqa: SIM118
        if wrong := sorted(listed ^ found):
            (tensor, name), here = wrong[0], "does not have" if wrong[0] in listed else "has, beside its index,"
            raise ValueError(
                f"{folder}: {name} {here} {tensor}{_more(wrong)}"
                "\n  fix: download the model's files again, all of one version"
            )
        self.prefix = BODY if BARE in self.file_of else ""
        self.file_of = {self.prefix + tensor: name for tensor, name in self.file_of.items()}

    def _file(self, name: str):
        if name not in self.open:
            if not (self.folder / name).exists():
                raise ValueError(f"{self.folder}: has no {name}\n  fix: give a folder with safetensors files")
            library = safetensors()
            try:
                self.open[name] = library.safe_open(self.folder / name, framework="pt")
            except library.SafetensorError as error:
                raise ValueError(
                    f"{self.folder}: {name} cannot be read, it is perhaps truncated: {error}"
                    "\n  fix: download the model's files again, all of one version"
                ) from None
        return self.open[name]

    def __getitem__(self, tensor: str):
        if self.packed and tensor + BLOCKS in self.file_of:
            return PackedSlice(self[tensor + BLOCKS], self[tensor + EXPONENTS], f"{self.folder}: {tensor}")
        stored = tensor.removeprefix(self.prefix)
        found, scale = self.open[self.file_of[tensor]].get_slice(stored), scale_of(tensor, self.file_of)
        return ScaledSlice(found, self[scale][:], self.blocks, f"{self.folder}: {tensor}") if scale else found

    def dtypes(self, layouts: dict, config: Config) -> dict:
        """Return the dtype of each leaf: the narrowest that holds all of the model's tensors exactly.

        A router's bias may have another dtype.
        """

        def holding(layout: FileLayout) -> torch.dtype:
            found = {self[name].get_dtype(): name for name in layout.tensors(config.sizes)}
            if strange := found.keys() - DTYPES.keys():
                kind = min(strange)
                raise ValueError(
                    f"{self.folder}: {found[kind]} is stored as {kind}, in which no params are computed"
                    f"\n  fix: give a dtype to read it in, or a folder with weights in {', '.join(DTYPES)}"
                )
            return reduce(torch.promote_types, (DTYPES[kind] for kind in found))

        biases = [layout for layout in tree.leaves(layouts) if layout.name.endswith(ROUTER_BIAS)]
        whole = reduce(torch.promote_types, (holding(each) for each in tree.leaves(layouts) if each not in biases))
        return tree.map(lambda layout: holding(layout) if layout in biases else whole, layouts)

    def check(self, places: dict, config: Config) -> None:
        """Raise a ValueError naming a tensor that is missing, is left over or has another shape."""
        layouts = tree.leaves(places)
        count = sum(math.prod(config.sizes[dim] for dim in layout.numbered) for layout in layouts)
        if count > len(self.file_of) + MOST_MISSING:
            what = f"{self.folder}: has {len(self.file_of):,} tensors; the sizes in config.json give {count:,}"
            raise ValueError(f"{what}\n  fix: take both from one version of the model")
        wanted = {n: layout.stored_shape(config.sizes) for layout in layouts for n in layout.tensors(config.sizes)}
        names = self.file_of
        found = {tensor for tensor in names if not (tensor.endswith(COMPUTED) or is_scale(tensor, names))}
        found = {tensor.removesuffix(BLOCKS) for tensor in found} if self.packed else found
        found -= {tensor for tensor in found if tensor.startswith(DRAFT)}
        for name, (_, value) in _constants(config).items():
            if name in found and not math.isclose(float(self[name][...]), value, rel_tol=1e-2):  # rounded in bfloat16
                what = f"{self.folder}: {name} is {float(self[name][...])}; only {value} is computed here"
                raise ValueError(f"{what}\n  fix: give a model with this constant")
            found.discard(name)
        table = places["embed"].name
        if config.tied and {table, HEAD} <= found and torch.equal(self[table][:], self[HEAD][:]):
            found.remove(HEAD)  # some files hold the shared table twice
        if missing := sorted(wanted.keys() - found):
            what = f"{self.folder}: {missing[0]} is missing{_more(missing)}, a tensor of {config.name}"
            raise ValueError(f"{what}\n  fix: download the model's files again, all of one version")
        if extra := sorted(found - wanted.keys()):
            what = f"{self.folder}: {extra[0]} is left over{_more(extra)}: {config.name} has no such tensor"
            raise ValueError(f"{what}\n  fix: download the model's files again, all of one version")
        for tensor, shape in wanted.items():
            if (there := tuple(self[tensor].get_shape())) != shape:
                what = f"{self.folder}: {tensor} is of shape {there}; the sizes in config.json give {shape}"
                raise ValueError(f"{what}\n  fix: take both files from one version of the model")


def _more(names: list) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
