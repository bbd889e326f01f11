"""The scaling of rotary positions in llama.cpp, read from the keys of a GGUF file into the form of config.json."""

from pathlib import Path

import numpy

from scaling.configs.attention import RopeScaling

FREQUENCIES = "rope_freqs.weight"  # of llama: what Llama 3.1's scaling divides each rotary frequency by
SCALINGS = [(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)]  # of Llama 3.1 and 3.2
SCALING = ("type", "factor", "original_context_length", "attn_factor", "finetuned")  # keys under rope.scaling


def unread(path: Path, what: str) -> ValueError:
    """Return the error for a feature that changes a model and is not read from GGUF."""
    return ValueError(
        f"{path}: has {what}, which is not read from GGUF"
        "\n  fix: give the model's Hugging Face folder, or its name on the hub"
    )


def rope_scaling(path: Path, fields: dict, table: dict, frequencies: numpy.ndarray | None) -> dict | None:
    """Return the rope_scaling of config.json, which llama.cpp puts together from several keys.

    Without a type it is linear, and without a factor nothing is scaled, whatever the type. Llama 3.1's scaling is in
    the file as the factor of each frequency.

    Args:
        path: The file, for errors.
        fields: Its keys of rotary positions, with their values.
        table: The rest of config.json.
        frequencies: The factors, where the file has any.
    """
    kind = table["model_type"]
    prefix = f"{kind}.rope.scaling."
    said = fields.get(f"{prefix}type") or "linear"
    if said not in ("none", "linear", "yarn", "longrope"):
        raise unread(path, f"a rope.scaling.type {said!r}")
    if others := sorted({key for key in fields if key.startswith(prefix)} - {prefix + key for key in SCALING}):
        raise unread(path, f"the key {others[0]}")
    if (attention := fields.get(f"{prefix}attn_factor")) not in (None, 1.0):
        raise unread(path, f"a rope.scaling.attn_factor of {attention}")
    factor = fields.get(f"{prefix}factor", fields.get(f"{kind}.rope.scale_linear")) or 1.0
    if said == "longrope":
        return {"rope_type": said}  # which the config names as not computed
    scaled = said != "none" and factor != 1.0
    if frequencies is not None and not numpy.all(frequencies == 1.0):
        if scaled:
            raise unread(path, f"a scaling by {factor} beside {FREQUENCIES}")
        return _llama3(path, frequencies, table)
    if not scaled:
        return None
    scaling = {"rope_type": said, "factor": factor}
    if said == "yarn":
        original = fields.get(f"{prefix}original_context_length") or table["max_position_embeddings"]
        scaling |= {"original_max_position_embeddings": original}
    return scaling


def _llama3(path: Path, given: numpy.ndarray, table: dict) -> dict:
    """Return the rope_scaling whose factors of the frequencies are these. ValueError if none is known."""
    f = table["rope_theta"] ** (-numpy.arange(0, table["head_dim"], 2) / table["head_dim"])
    for factor, low, high, original in SCALINGS:
        if numpy.allclose(given, f / RopeScaling("llama3", factor, low, high, original).slowed(f)):
            names = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor} | names
    raise ValueError(
        f"{path}: {FREQUENCIES} is of no scaling known here (Llama 3.1, Llama 3.2)"
        "\n  fix: give the model's Hugging Face folder, or its name on the hub"
    )
