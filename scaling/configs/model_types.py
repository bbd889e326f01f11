"""Each model_type's class in transformers: the keys of config.json that it reads, and its names of tensors in files.

A class reads the keys that it names and ignores all others, so a `sliding_window` in a Llama's file changes nothing. A
key that the file leaves out has the class's default. The classes are in model_types.toml, which
`tests/models/test_config_keys.py` compares with transformers. After the classes come two tables within config.json: of
rotary positions, as each class reads it, and of quantized weights.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from scaling.common.arguments import of_type
from scaling.configs.attention import RopeScaling


@dataclass(frozen=True)
class ModelType:
    """One model_type.

    Attributes:
        architecture: The class in transformers whose models are computed here; "" for a type that is only counted.
        keys: The keys that change the class's function, each with its default. For a type that is only counted, the
            defaults of the keys that it shares with others.
        theta: The class's base of rotary positions.
        aliases: Other names of keys. Where a file has both, the class takes the other name's value.
        fixed: Fields of Config that all models of the class share.
        meant: Values of hidden_act that the class reads as another activation.
        root_scaled: Whether the class multiplies embeddings by sqrt(D).
        gated_window: Whether a window counts only with use_sliding_window.
        pattern: In a file without layer_types, each layer whose number is a multiple of this has full attention, and
            the others have the window.
        partial: The default of partial_rotary_factor in a class that rotates only a part of each head.
        rope_keys: The keys of the base and of the rotated part, where they are not in a separate table.
        local_theta: The base of layers with a window, in a class in which it differs from the other layers' base.
        stretched: Whether positions of type "dynamic" with an `alpha` have a larger base, theta alpha^(H / (H - 2)).
        rope: The default table of rotary positions.
        longrope: Whether scalings of the types "su" and "yarn" mean longrope.
        still_full: Whether layers with full attention rotate nothing in a model whose other layers have a window.
        renamed: Parts of the names in `models.leaves` of tensors in a file, each with what replaces it in this class.
        joined: Params that share a tensor, or have other dims in it: part of a name -> [what replaces it, the tensor's
            dims, the param's place in it]. The place "NH KH KH: 1" is the second of three params that follow each other
            along the rows, and "2: 0" the first of two that a "*" in the dims numbers.
        paired: Whether the two coordinates of a rotary plane are neighbours in a head.
    """

    architecture: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 1e4
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    meant: Mapping[str, str] = field(default_factory=dict)
    root_scaled: bool = False
    gated_window: bool = False
    pattern: int = 0
    partial: float | None = None
    rope_keys: Sequence[str] = ("rope_theta", "partial_rotary_factor")
    local_theta: float | None = None
    stretched: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    longrope: bool = False
    still_full: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paired: bool = False

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that the class reads, each from the file or with its default."""
        if not self.architecture:
            return {**self.keys, **table}
        given = {**table, **{key: table[alias] for alias, key in self.aliases.items() if alias in table}}
        return {key: given.get(key, default) for key, default in self.keys.items()}


def _read_types() -> dict[str, ModelType]:
    """Return the types of model_types.toml by name."""
    tables: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

    def keys(table: dict) -> dict[str, Any]:
        found = keys(tables[table["like"]]) if "like" in table else {}
        found = {key: default for key, default in found.items() if key not in table.get("without", ())}
        return found | dict.fromkeys(table.get("null", ())) | table.get("keys", {})

    def read(table: dict) -> ModelType:
        own: dict[str, Any] = table | {"keys": keys(table)}
        return ModelType(**{field.name: own[field.name] for field in fields(ModelType) if field.name in own})

    return {name: read(table) for name, table in tables.items()}


KINDS = _read_types()
COUNTED = ModelType("", {"rms_norm_eps": 1e-6})  # a type without a row

# The table of rotary positions

ORIGINAL = "original_max_position_embeddings"
CONTEXTS = ("llama3", "yarn", "longrope")  # scalings with this key, the context of earlier training


def scaling_of(table: dict, kind: ModelType) -> dict:
    """Return the file's table of rotary positions, the one that counts if it has two; without any, the class's."""
    if not table.get("rope_scaling") and table.get("rope_parameters") is None:
        return dict(kind.rope)
    given = table.get("rope_scaling") or table.get("rope_parameters") or {}
    of_type("rope_scaling", given, dict)
    return given


def rotary(table: dict, read: dict, kind: ModelType) -> dict:
    """Return theta and rope_scaling, by transformers' rules for keys that occur twice or not at all.

    If a file has `rope_scaling`, its `rope_parameters` are ignored. A base in the table takes precedence over the base
    at the top level. An original context at the top level takes precedence over the table's, except in a class whose
    layers with a window have a separate table.
    """
    given, local = scaling_of(table, kind), {}
    if kind.local_theta is not None:
        given, local = _by_kind(table, kind)
    theta = given.get("rope_theta", table.get(kind.rope_keys[0], kind.theta))
    of_type("rope_theta", theta, float)
    if kind.stretched and given.get("rope_type", given.get("type")) == "dynamic" and given.get("alpha"):
        of_type("alpha", given["alpha"], float)
        H = read["head_dim"] or read["hidden_size"] // max(1, read["num_attention_heads"])
        theta, given = theta * given["alpha"] ** (H / max(1, H - 2)), {}
    if any(isinstance(each, dict) for each in given.values()):
        return {"theta": float(theta), "rope_scaling": RopeScaling("by layer")}
    share = 1.0
    if kind.partial is not None:
        share = given.get("partial_rotary_factor", table.get(kind.rope_keys[1], kind.partial))
        of_type("partial_rotary_factor", share, float)
    scaling = given.get("rope_type", given.get("type"))
    if kind.longrope and scaling in ("su", "yarn"):  # its names in older files
        given, scaling = given | {"rope_type": "longrope"}, "longrope"
    if scaling in CONTEXTS:
        original: Any = given.get(ORIGINAL, read.get("max_position_embeddings"))
        if ORIGINAL in {*table, *kind.keys} and kind.local_theta is None:
            original = table.get(ORIGINAL, kind.keys.get(ORIGINAL))
        if original is not None or kind.architecture:
            of_type(ORIGINAL, original, float)
            given = given | {ORIGINAL: original}
        if scaling == "longrope" and original and given.get("factor") is None:
            given = given | {"factor": (read.get("max_position_embeddings") or original) / original}
    return {"theta": float(theta), "rope_scaling": RopeScaling.of(given), "rotary_share": float(share)} | local


def _by_kind(table: dict, kind: ModelType) -> tuple[dict, dict]:
    """Return the table of rotary positions of layers that see all, and the base of those with a window."""
    tables, scaling = table.get("rope_parameters") or {}, table.get("rope_scaling") or {}
    of_type("rope_parameters", tables, dict)
    of_type("rope_scaling", scaling, dict)
    full, local = (tables.get(f"{name}_attention") or {} for name in ("full", "sliding"))
    if local.get("rope_type", "default") != "default" or {*tables} - {"full_attention", "sliding_attention"}:
        return {"other": {}}, {}
    base = table.get("rope_local_base_freq", kind.local_theta) if kind.theta != kind.local_theta else kind.local_theta
    base = local.get("rope_theta", base)
    of_type("rope_theta", base, float)
    # transformers reads `truncate` at the top of rope_parameters, so never of a table for one kind of layers
    given = {key: value for key, value in (full | scaling).items() if key != "truncate"}
    return given, {"local_theta": float(base)}


# Quantized weights: DeepSeek's, compressed-tensors' and MXFP4 are read. A weight W[rows, columns] in FP8 is stored in
# E4M3 with scales, `weight_scale_inv` or `weight_scale`, by which it is multiplied when it is read. In MXFP4 (GPT-OSS)
# an expert's matrices are `_blocks` and `_scales`.

FLOATS = ("float-quantized", "naive-quantized")  # compressed-tensors' formats of weights that are stored as E4M3


def weight_blocks(quantized: dict[str, Any]) -> tuple[int, int] | None:
    """Return how many rows and columns of a weight share a scale, 0 for all; None for weights that are not read.

    The size of a block is the config's, and never guessed from the shapes of the scales.
    """
    method, cache = quantized.get("quant_method"), quantized.get("kv_cache_scheme")
    if method == "fp8" and quantized.get("fmt", "e4m3") == "e4m3":
        return _pair(quantized.get("weight_block_size") or (0, 0))
    groups = [*(quantized.get("config_groups") or {}).values()]
    if method != "compressed-tensors" or quantized.get("format") not in FLOATS or len(groups) != 1 or cache:
        return None
    weights = groups[0].get("weights") or {}
    if (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) != ("float", 8, True):
        return None
    blocks = {"tensor": (0, 0), "channel": (1, 0), "block": weights.get("block_structure")}
    return _pair(blocks.get(weights.get("strategy", "tensor")))


def unread_quantization(table: dict[str, Any]) -> list[str]:
    """Return the quantization of a config.json by name if it is not read, or nothing."""
    if (quantized := table.get("quantization_config")) is None:
        return []
    of_type("quantization_config", quantized, dict)
    read = weight_blocks(quantized) or (experts_packed(quantized) and table.get("model_type") == "gpt_oss")
    return [] if read else [f"quantization_config {quantized.get('quant_method', '')!r}"]


def experts_packed(quantized: dict[str, Any]) -> bool:
    """Return whether the experts' matrices are stored in MXFP4."""
    return quantized.get("quant_method") == "mxfp4"


def _pair(block: Any) -> tuple[int, int] | None:
    whole = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n >= 0 for n in block)
    return (block[0], block[1]) if whole else None
