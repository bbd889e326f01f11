"""The tables in a Hugging Face config.json: of rotary positions, as each class reads them, and of quantized weights.

Of quantized weights DeepSeek's, compressed-tensors' and MXFP4 are read. A weight W[rows, columns] in FP8 is stored in
E4M3 with scales, `weight_scale_inv` or `weight_scale`, by which it is multiplied when it is read. In MXFP4 (GPT-OSS) an
expert's matrices are `_blocks` and `_scales`.
"""

from typing import Any

from scaling.common.arguments import of_type
from scaling.configs.attention import RopeScaling
from scaling.configs.model_types import ModelType

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
