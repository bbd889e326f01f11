"""The tensors of a Hugging Face checkpoint that make up each param, and the order of their dims in the files."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.configs.hugging_face_write import kind_of
from scaling.models.leaves import STACKED, Leaf, check_computed, types_of
from scaling.spec import parse


@dataclass(frozen=True)
class FileLayout:
    """The tensors of one param in a checkpoint.

    Attributes:
        name: The tensors' name, with a field such as {L} for each dim that numbers the tensors.
        groups: The dims of each tensor, which may merge several dims of the param. A "*" numbers the params that share
            the tensor.
        dims: The dims of the param.
        layers: The number in the model of each layer of the param's stack.
        joined: If a tensor holds several params along its rows, the rows of each.
        part: The index of this param in `joined` or in "*".
        parts: The size of "*".
        order: The position in the file of each coordinate of H in the param, if their orders differ.
    """

    name: str
    groups: tuple[str, ...]
    dims: tuple[str, ...]
    layers: tuple[int, ...] = ()
    joined: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1
    order: tuple[int, ...] = ()

    def tensor(self, at: Mapping[str, int]) -> str:
        """Return the name of the tensor with these indices."""
        return self.name.format(**dict(at) | {dim: self.layers[at[dim]] for dim in "LGl" if dim in at})

    @property
    def numbered(self) -> list[str]:
        """The dims that number the tensors."""
        return re.findall(r"{(\w)}", self.name)

    def indices(self, ranges: Mapping[str, slice]) -> Iterator[dict[str, int]]:
        """Yield the indices, such as {"L": 3, "E": 0}, of each tensor in these ranges of dims.

        A dim without a range is left out.
        """
        dims = [dim for dim in self.numbered if dim in ranges]
        for at in itertools.product(*(range(ranges[dim].start, ranges[dim].stop) for dim in dims)):
            yield dict(zip(dims, at, strict=True))

    def tensors(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yield the names of all tensors of the param."""
        for at in self.indices({dim: slice(0, sizes[dim]) for dim in self.numbered}):
            yield self.tensor(at)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of this param's part of each tensor."""
        return tuple(math.prod({**sizes, "*": 1}[dim] for dim in group) for group in self.groups)

    def rows(self, sizes: Mapping[str, int], count: int | None = None) -> int:
        """Return the number of rows of the first `count` params that share a tensor; with None, of all of them."""
        return sum(math.prod(sizes[dim] for dim in group) for group in self.joined[:count])

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of each whole tensor."""
        first, *rest = (math.prod({**sizes, "*": self.parts}[dim] for dim in group) for group in self.groups)
        return self.rows(sizes) if self.joined else first, *rest

    def read(self, tensor, ranges: Mapping[str, slice], sizes: Mapping[str, int]) -> Tensor:
        """Read the part `ranges` of one tensor, and return it with its dims in the param's order.

        If `tensor` is a slice of a file, only the rows of the part are read.
        """
        sizes, rows, part = {**sizes, "*": self.parts}, [], 0 if self.joined else self.part
        ranges = {**ranges, "*": slice(part, part + 1)}
        for first, *rest in self.groups:
            inner = math.prod(sizes[dim] for dim in rest)
            before = self.rows(sizes, self.part) if self.joined and not rows else 0
            rows.append(slice(before + ranges[first].start * inner, before + ranges[first].stop * inner))
        part, flat = tensor[tuple(rows)], "".join(self.groups)
        led = {group[0] for group in self.groups}
        part = part.reshape([ranges[d].stop - ranges[d].start if d in led else sizes[d] for d in flat])
        index: dict[str, Any] = {dim: slice(None) if dim in led else ranges[dim] for dim in flat}
        if self.order:
            index["H"] = torch.tensor(self.order)[ranges["H"]]
        part = part[tuple(index.values())]
        return part.permute([flat.index(dim) for dim in ("*", *self.dims) if dim in flat]).reshape(
            [ranges[dim].stop - ranges[dim].start for dim in self.dims if dim in flat]
        )

    def write(self, whole: Tensor) -> Tensor:
        """Return this param's part of one tensor of a file, with the dims that the file merges still separate.

        `join` makes the tensor of the parts of all params that share it.
        """
        here = [dim for dim in self.dims if dim not in self.numbered]
        if self.order:
            whole = whole.index_select(here.index("H"), torch.tensor(self.order).argsort())
        flat = "".join(self.groups)
        part = whole.permute([here.index(dim) for dim in flat if dim != "*"])
        return part.unsqueeze(flat.index("*")) if "*" in flat else part

    def join(self, parts: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """Return a file's tensor, joined from the parts of all params that share it, in their order."""
        along = 0 if self.joined else max("".join(self.groups).find("*"), 0)
        parts = [part.flatten(0, len(self.groups[0]) - 1) for part in parts] if self.joined else parts
        return torch.cat([*parts], along).reshape(self.stored_shape(sizes)).contiguous()


def turned_order(H: int, rotary: int, paired: bool) -> tuple[int, ...]:
    """Return the position in a file of each coordinate of a head, or () if all positions are equal.

    In this library plane i has its coordinates at i and i + H/2, and the first rotary/2 planes rotate. In files the
    first `rotary` coordinates rotate, and the two of a plane are neighbours if they are `paired`, else rotary/2 apart.
    """
    planes = torch.arange(rotary).view(-1, 2).T if paired else torch.arange(rotary).view(2, -1)
    order = torch.cat([planes, torch.arange(rotary, H).view(2, -1)], 1).flatten().tolist()
    return () if order == [*range(H)] else tuple(order)


def layer_numbers(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the numbers in the model of the layers of each stack, by the dim that counts them."""
    stacks = {"L": "layers", "G": "dense", "l": "linear"}
    return {dim: tuple(l for l, kind in enumerate(config.kinds) if kind == stacks[dim]) for dim in stacks}


def leaf_layouts(config: Config) -> dict:
    """Return the FileLayout of each param. Raise a ValueError if no class of Hugging Face's is this model."""
    check_computed(config)
    kind, numbers = kind_of(config), layer_numbers(config)
    order = () if config.latent else turned_order(config.H, config.rotary, kind in PAIRED)

    def layout(key: str, leaf: Leaf) -> FileLayout:
        stack, *_ = of_param = parse(leaf.trained).dim_names
        name, _, dims = leaf.file.rstrip("]").partition("[")
        name, dims, joined = file_of(kind, f"model.layers.{{{stack}}}.{name}" if stack in STACKED else name, dims)
        rows, _, part = joined.partition(": ")
        parts = {"parts": int(rows)} if rows.isdecimal() else {"joined": tuple(rows.split())}
        given: Any = {"order": order if key in TURNED else ()} | parts
        return FileLayout(
            name, tuple(dims.split(", ")), of_param, numbers.get(stack, ()), part=int(part or 0), **given,
        )  # fmt: skip

    return types_of(config, layout)


# How the files of each model_type name, join and order the params, where they differ from Llama's. `models.leaves` has
# the names and dims of most classes; a row here is about one model_type.

_AFTER = {
    "post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"
}  # fmt: skip
RENAMED: dict[str, dict[str, str]] = {  # parts of names, each with what replaces it
    "mixtral": {
        "mlp.gate": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts", ".up_proj": ".w3",
        ".gate_proj": ".w1", ".down_proj": ".w2",
    },
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "qwen2_moe": {"shared_experts": "shared_expert"},
    "qwen3_next": {"shared_experts": "shared_expert"},
    "olmo2": _AFTER,
    "olmo3": _AFTER,
    "exaone4": _AFTER,
    "gemma2": {"post_attention_layernorm": "pre_feedforward_layernorm"} | _AFTER,
    "vaultgemma": {"post_attention_layernorm": "pre_feedforward_layernorm"},
    "gemma3_text": {"post_attention_layernorm": "pre_feedforward_layernorm"} | _AFTER,
    "hunyuan_v1_dense": {"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    "apertus": {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    "phi": {
        "model.norm": "model.final_layernorm", "o_proj": "dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
    },
    "starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
    "gpt_neox": {
        "model.embed_tokens": "gpt_neox.embed_in", "lm_head": "embed_out", "model.norm": "gpt_neox.final_layer_norm",
        "model.layers": "gpt_neox.layers", "self_attn.o_proj": "attention.dense", "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    },
    "gpt2": {
        "model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe",
        "model.norm": "transformer.ln_f", "model.layers": "transformer.h", "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
    "llama4_text": {"mlp.gate.": "feed_forward.router.", "mlp.": "feed_forward.", "shared_experts": "shared_expert"},
    "granitemoe": {"mlp.gate.weight": "block_sparse_moe.router.layer.weight"},
}  # fmt: skip

# Params that share a tensor or have other dims in it: part of a name -> (what replaces it, the tensor's dims). A "*" in
# the dims numbers the params of the tensor, which its rows before the colon list: "NH KH KH: 1" is the second of three
# that follow each other along the rows; "2: 0" is the first of two, at index 0 of "*".
Row = tuple[str, str, str]
_FUSED_MLP: dict[str, Row] = {
    "mlp.gate_proj": ("mlp.gate_up_proj", "*F, D", "2: 0"),
    "mlp.up_proj": ("mlp.gate_up_proj", "*F, D", "2: 1"),
}
JOINED: dict[str, dict[str, Row]] = {
    "phi3": {
        "self_attn.q_proj": ("self_attn.qkv_proj", "NH, D", "NH KH KH: 0"),
        "self_attn.k_proj": ("self_attn.qkv_proj", "KH, D", "NH KH KH: 1"),
        "self_attn.v_proj": ("self_attn.qkv_proj", "KH, D", "NH KH KH: 2"),
    }
    | _FUSED_MLP,
    "qwen3_next": {
        "self_attn.q_proj": ("self_attn.q_proj", "N*H, D", "2: 0"),
        "self_attn.g_proj": ("self_attn.q_proj", "N*H, D", "2: 1"),
        "conv_q": ("conv1d", "kh, *, w", "kh kh nv: 0"),
        "conv_k": ("conv1d", "kh, *, w", "kh kh nv: 1"),
        "conv_v": ("conv1d", "nv, *, w", "kh kh nv: 2"),
    },
    "cohere": {"q_norm": ("q_norm", "N, H", ""), "k_norm": ("k_norm", "K, H", "")},
    "stablelm": {"q_norm": ("q_layernorm.norms.{N}", "H", ""), "k_norm": ("k_layernorm.norms.{K}", "H", "")},
    "glm": _FUSED_MLP,
    "glm4": _FUSED_MLP,
    "gpt_neox": {
        f"model.layers.{{L}}.self_attn.{name}_proj.{kind}": (
            f"gpt_neox.layers.{{L}}.attention.query_key_value.{kind}",
            dims,
            f"3: {i}",
        )
        for i, name in enumerate("qkv")
        for kind, dims in (("weight", f"{'N' if i == 0 else 'K'}*H, D"), ("bias", f"{'N' if i == 0 else 'K'}*H"))
    },
    "gpt2": {
        f"model.layers.{{L}}.self_attn.{name}_proj.{kind}": (f"transformer.h.{{L}}.attn.c_attn.{kind}", dims, f"3: {i}")
        for i, (name, N) in enumerate(zip("qkv", "NKK", strict=True))
        for kind, dims in (("weight", f"D, *{N}H"), ("bias", f"*{N}H"))
    }
    | {
        f"model.layers.{{L}}.{ours}.{kind}": (f"transformer.h.{{L}}.{theirs}.{kind}", dims, "")
        for ours, theirs, rows, columns in (
            ("self_attn.o_proj", "attn.c_proj", "NH", "D"),
            ("mlp.up_proj", "mlp.c_fc", "D", "F"),
            ("mlp.down_proj", "mlp.c_proj", "F", "D"),
        )
        for kind, dims in (("weight", f"{rows}, {columns}"), ("bias", columns))
    },
    "gpt_oss": {
        "mlp.experts.{E}.gate_proj.weight": ("mlp.experts.gate_up_proj", "E, D, F*", "2: 0"),
        "mlp.experts.{E}.up_proj.weight": ("mlp.experts.gate_up_proj", "E, D, F*", "2: 1"),
        "mlp.experts.{E}.down_proj.weight": ("mlp.experts.down_proj", "E, F, D", ""),
        "mlp.experts.{E}.gate_proj.bias": ("mlp.experts.gate_up_proj_bias", "E, F*", "2: 0"),
        "mlp.experts.{E}.up_proj.bias": ("mlp.experts.gate_up_proj_bias", "E, F*", "2: 1"),
        "mlp.experts.{E}.down_proj.bias": ("mlp.experts.down_proj_bias", "E, D", ""),
    },
    "llama4_text": {
        "mlp.experts.{E}.gate_proj.weight": ("feed_forward.experts.gate_up_proj", "E, D, *F", "2: 0"),
        "mlp.experts.{E}.up_proj.weight": ("feed_forward.experts.gate_up_proj", "E, D, *F", "2: 1"),
        "mlp.experts.{E}.down_proj.weight": ("feed_forward.experts.down_proj", "E, F, D", ""),
    },
    "granitemoe": {
        "mlp.experts.{E}.gate_proj": ("block_sparse_moe.input_linear", "E, *F, D", "2: 0"),
        "mlp.experts.{E}.up_proj": ("block_sparse_moe.input_linear", "E, *F, D", "2: 1"),
        "mlp.experts.{E}.down_proj": ("block_sparse_moe.output_linear", "E, D, F", ""),
    },
}

# The two coordinates of a rotary plane are neighbours in these classes.
PAIRED = ("ernie4_5", "helium", "glm", "glm4", "cohere", "cohere2", "llama4_text")
TURNED = ("W_Q", "W_K", "b_Q", "b_K", "norm_Q", "norm_K")  # leaves[.., H] whose H positions turn


def file_of(kind: str, name: str, dims: str) -> Row:
    """Return the tensors' name and dims in files of this model_type, and how params are joined in them."""
    for part, (other, theirs, joined) in JOINED.get(kind, {}).items():
        if part in name:
            return name.replace(part, other), theirs, joined
    for part, other in RENAMED.get(kind, {}).items():
        name = name.replace(part, other)
    return name, dims, ""
