"""Low-rank adapters as values: how they start, their sum with the params, and PEFT's files of them.

A folder of PEFT's has adapter_config.json, and in adapter_model.safetensors lora_A[r, inputs] and lora_B[outputs, r] of
each layer's matrix, or each expert's, under the name that the matrix has in a Hugging Face folder. Needs safetensors,
the extra `hf`.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from scaling import tree
from scaling.collectives import einsum
from scaling.common.arguments import read_table
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.hf import safetensors
from scaling.models.hf_layout import FileLayout, leaf_layouts
from scaling.models.leaves import specs_of
from scaling.models.lora import MATRICES, Lora, adapted_leaves, adapter_specs, product_line, sizes_of
from scaling.spec import parse

CONFIG, FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
Place = tuple[str, str]  # the stack and the name of a matrix
MERGE = "merge it into the model by PEFT's merge_and_unload, and give the merged folder"  # a fix
# Options of PEFT that are not computed here, each with the value by which a file does not ask for it.
REFUSED = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "lora_bias": False, "fan_in_fan_out": False, "layer_replication": None, "target_parameters": None,
    "trainable_token_indices": None, "alora_invocation_tokens": None, "use_qalora": False, "use_bdlora": None,
}  # fmt: skip


def init(config: Config, lora: Lora, seed: int = 0, dtype=torch.float32, device=None, *, mesh=None, specs=None) -> dict:
    """Return adapters that change nothing yet: A normal with variance 1/(its inputs), B zeros.

    `specs` are the types of the params on the `mesh`. The values are the same on every mesh.
    """
    lora.check(config)
    if mesh is None:
        mesh, device = AbstractMesh({}), device or "cpu"
    how: dict[str, dict] = {stack: {} for stack in adapted_leaves(config, lora)}
    for stack, leaves in adapted_leaves(config, lora).items():
        for name, leaf in leaves.items():
            std = math.prod(config.sizes[dim] for dim in str(leaf.start)) ** -0.5
            how[stack][name] = {"A": tree.Normal(std), "B": tree.Constant(0.0)}
    types = {"lora": adapter_specs(config, lora, specs)}
    return tree.init({"lora": how}, types, sizes_of(config, lora), mesh, seed, dtype, device)["lora"]


def merged(params: dict, adapters: Mapping, lora: Lora, config: Config, specs: Mapping | None = None) -> dict:
    """Return the params with W + s A B in place of each adapted W, typed as before: nothing is sent."""
    types, found = specs_of(config) if specs is None else specs, dict(params)
    for stack, leaves in adapted_leaves(config, lora).items():
        lines = {name: product_line(str(types[stack][name]), leaf.start) for name, leaf in leaves.items()}
        found[stack] = merged_layer(params[stack], adapters[stack], lines, lora.scale)
    return found


def merged_layer(W: dict, adapters: Mapping, lines: Mapping[str, str], scale: float) -> dict:
    """Return the weights of one layer or a stack, W + s A B in place of each adapted W, by lines of `product_line`."""
    products = {name: einsum(lines[name], own["A"], own["B"]).to(W[name].dtype) for name, own in adapters.items()}
    return W | {name: torch.add(W[name], AB, alpha=scale) for name, AB in products.items()}


def load(folder: "str | Path", config: Config) -> tuple[Lora, dict]:
    """Read a PEFT folder and return (lora, adapters), whole and on the CPU.

    Raises:
        ValueError: The adapters are not computed here, or belong to another model.
    """
    folder = Path(folder)
    for name in (CONFIG, FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: has no {name}\n  fix: give a folder that PEFT's save_pretrained wrote")
    table = read_table(folder / CONFIG)
    asked = [f"{key}={table[key]!r}" for key, none in REFUSED.items() if (table.get(key) or none) != none]
    asked += [] if table.get("peft_type") == "LORA" else [f"peft_type={table.get('peft_type')!r}"]
    if asked:
        raise ValueError(
            f"{folder / CONFIG}: {', '.join(asked)}: not computed here\n"
            "  rule: an adapter is W + s A B, of one rank on every layer, without biases\n"
            f"  fix: {MERGE}"
        )
    tensors = safetensors().torch.load_file(folder / FILE)
    layouts = _layouts(config, MATRICES)
    plain = {place: layout for place, layout in layouts.items() if _is_plain(layout)}
    there = {place[1] for place, _, key in _keys(plain, config) if key in tensors}
    on = tuple(name for name in MATRICES if name in there)
    rank, alpha = table["r"], float(table["lora_alpha"])
    lora = Lora(rank, on, alpha * math.sqrt(rank) if table.get("use_rslora") else alpha)
    if not on:
        _check_plain(layouts, config)
        raise ValueError(f"{folder}: has no adapter of {config.name}\n  fix: give adapters of this model")
    lora.check(config)
    rows: dict = {}
    for place, part, key in _keys(_layouts(config, on), config):
        shape = _shape(layouts[place], part, config, rank)
        if (found := tensors.pop(key, None)) is None or tuple(found.shape) != shape:
            what = "is missing" if found is None else f"is of shape {tuple(found.shape)}, not {shape}"
            what = f"{folder / FILE}: {key} {what}: an adapter of {config.name}"
            raise ValueError(f"{what}\n  fix: give adapters of this model")
        rows.setdefault((*place, part), []).append(found.T)
    if tensors:
        _check_plain(layouts, config)
        raise ValueError(
            f"{folder / FILE}: {min(tensors)} is left over: {config.name} has no such adapter"
            "\n  fix: give adapters of this model"
        )
    types = adapter_specs(config, lora)
    shapes = [parse(text).global_shape(sizes_of(config, lora)) for text in tree.leaves(types)]
    each = [torch.stack(rows[place]).reshape(shape) for place, shape in zip(sorted(rows), shapes, strict=True)]
    return lora, tree.unflatten(types, each)


def save(folder: "str | Path", config: Config, lora: Lora, adapters: Mapping, base: str = "") -> None:
    """Write whole adapters as a PEFT folder; `base` is the name or the folder of the model that they adapt."""
    folder, tensors = Path(folder), {}
    layouts = _layouts(config, lora.on)
    _check_plain(layouts, config, "export without --adapters, which merges them into the weights")
    seen: Counter = Counter()
    for (stack, name), part, key in _keys(layouts, config):
        layout = layouts[stack, name]
        rows, columns = _shape(layout, part, config, lora.rank)
        each = adapters[stack][name][part].flatten(0, len(layout.numbered) - 1)  # of layers, and of experts
        tensors[key] = each[seen[stack, name, part]].detach().cpu().reshape(columns, rows).T.contiguous()
        seen[stack, name, part] += 1
    modules = sorted({layout.name.split(".")[-2] for layout in layouts.values()})
    table = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": modules, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    safetensors().torch.save_file(tensors, folder / FILE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(table, indent=2) + "\n")


def _layouts(config: Config, names: Collection[str]) -> dict[Place, FileLayout]:
    """Return the layouts of the matrices with these names in each stack of layers."""
    stacks = {stack: each for stack, each in leaf_layouts(config).items() if stack in ("dense", "layers")}
    return {(stack, name): each[name] for stack, each in stacks.items() for name in names if name in each}


def _is_plain(layout: FileLayout) -> bool:
    """Return whether a file has a tensor of two dims for each matrix, in the order of the param's dims."""
    return not layout.joined and not layout.order and layout.parts == 1 and len(layout.groups) == 2


def _check_plain(layouts: Mapping[Place, FileLayout], config: Config, fix: str = MERGE) -> None:
    """Raise a ValueError, which ends with `fix`, unless all layouts are plain."""
    if not all(map(_is_plain, layouts.values())):
        raise ValueError(
            f"{config.name}: adapters of {config.model_type}, whose files have params joined or in another order, are "
            f"not computed here\n  fix: {fix}"
        )


def _keys(layouts: Mapping[Place, FileLayout], config: Config) -> Iterator[tuple[Place, str, str]]:
    """Yield ((stack, leaf), "A" or "B", the tensor's name) of every adapter, layer by layer."""
    for place, layout in layouts.items():
        for tensor in layout.tensors(config.sizes):
            for part in "AB":
                yield place, part, f"{PREFIX}{tensor.removesuffix('weight')}lora_{part}.weight"


def _shape(layout: FileLayout, part: str, config: Config, rank: int) -> tuple[int, int]:
    """Return the shape of A or B in a file."""
    outputs, inputs = layout.shape(config.sizes)
    return (rank, inputs) if part == "A" else (outputs, rank)
