"""Quantized weights of a Hugging Face folder, as its quantization_config says: DeepSeek's, compressed-tensors', MXFP4.

A weight W[rows, columns] in FP8 is stored in E4M3 with scales, `weight_scale_inv` or `weight_scale`, by
which it is multiplied when it is read. In MXFP4 (GPT-OSS) an expert's matrices are `_blocks` and `_scales`.
"""

from typing import Any

from scaling.common.arguments import of_type

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
