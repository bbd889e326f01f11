"""FILE.gguf, llama.cpp's form of a model, as a Hugging Face folder: `config_of`, `as_folder`.

The library gguf reads and dequantizes the file, and the weights become float32. llama.cpp reorders the rows of Llama's
queries and keys, because its rotary embedding takes neighbours as pairs; here they are put back in order. The scaling
of rotary positions, which llama.cpp puts together from several keys, gets the form of config.json.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from scaling.common.lazy import needing
from scaling.configs.attention import RopeScaling
from scaling.configs.config import Config
from scaling.configs.gguf_tokenizer import tokenizer_files, unread
from scaling.configs.model_types import KINDS
from scaling.configs.sources import table_config

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # names of llama.cpp's, and of Hugging Face's model_type
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
HEAD = {"output.weight": "lm_head.weight"}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
ALWAYS = {"qwen2": BIASES, "qwen3": {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}}
FREQUENCIES = "rope_freqs.weight"  # of llama: what Llama 3.1's scaling divides each rotary frequency by
SCALINGS = [(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)]  # of Llama 3.1 and 3.2
SCALING = ("type", "factor", "original_context_length", "attn_factor", "finetuned")  # keys under rope.scaling
OUTPUT_BIAS = {"attn_output.bias": "self_attn.o_proj.bias"}  # in llama files with the other biases


def config_of(path: Path) -> Config:
    """Return the sizes of a file's model. Raise a ValueError if it cannot be read, or is not computed here."""
    return table_config(_table(path, _read(path)), path)


def _folder(path: Path) -> Path:
    """Return the path of a file's folder in the cache, distinct for other files and for later versions of the file."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "scaling" / "gguf" / key / path.stem


def as_folder(path: Path) -> Path:
    """Write the Hugging Face folder of a file, with its tokenizer, once, into $XDG_CACHE_HOME/scaling; return its path.

    Raises:
        ValueError: The file cannot be read, or its model, quantization or tokenizer is unknown. Nothing is written.
    """
    if (folder := _folder(path)).is_dir():
        return folder
    reader = _read(path)
    table = _table(path, reader)
    table_config(table, path)  # refuses sizes that no model has
    tables = {"config.json": table} | tokenizer_files(path, lambda key: _field(reader, key))
    names = _names(path, reader, table)
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent.parent))
    try:
        (made / folder.name).mkdir()
        _write_tensors(made / folder.name, path, _tensors(path, reader, names, table))
        for name, content in tables.items():
            (made / folder.name / name).write_text(json.dumps(content, ensure_ascii=False) + "\n")
        made.rename(folder.parent)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _read(path: Path) -> Any:
    """Return a reader of the file, which maps it into memory."""
    with needing(f"{path}:", "gguf"):
        from gguf import GGUFReader
    try:
        return GGUFReader(path)
    except Exception as error:  # the library defines none; numpy and enum raise theirs on such bytes
        raise ValueError(
            f"{path}: is truncated, or no GGUF file that the library gguf knows: {error}"
            "\n  fix: download it again; for a new quantization, pip install -U gguf"
        ) from None


def _field(reader: Any, key: str) -> Any:
    """Return the value of a key, or None if it is absent. Floats of 32 bits are rounded back, so 1e-5 is 1e-5."""
    value = None if (field := reader.get_field(key)) is None else field.contents()
    return float(str(numpy.float32(value))) if isinstance(value, float) else value


def _size(path: Path, reader: Any, key: str) -> Any:
    """Return the value of a key that may be a list with one for each layer. ValueError if the layers differ."""
    value = _field(reader, key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise unread(path, f"{key} that differs among layers")
    return value[0]


def _table(path: Path, reader: Any) -> dict[str, Any]:
    """Return the config.json of a file, by llama.cpp's rules for keys that are missing.

    Raises:
        ValueError: A model of another architecture, one that lacks a size, or a key that changes what llama.cpp
            computes and is not read here.
    """
    kind = _field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{path}: is of llama.cpp's architecture {kind!r}; read are {' and '.join(ARCHITECTURES)}"
            "\n  fix: give the model's Hugging Face folder, or its name on the hub"
        )
    table: dict[str, Any] = {"architectures": [KINDS[kind].architecture], "model_type": kind, "hidden_act": "silu"}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, key in SIZES.items():
        table[name] = _size(path, reader, f"{kind}.{key}")
    table["num_key_value_heads"] = table["num_key_value_heads"] or table["num_attention_heads"]
    if missing := [f"{kind}.{key}" for name, key in SIZES.items() if table[name] is None]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}\n  fix: download the file again")
    heads = max(1, table["num_attention_heads"])
    table["head_dim"] = _field(reader, f"{kind}.attention.key_length") or table["hidden_size"] // heads
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: lacks the tensor token_embd.weight\n  fix: give a file of a whole model")
    table["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    table["tie_word_embeddings"] = "output.weight" not in tensors
    table["rope_theta"] = _field(reader, f"{kind}.rope.freq_base") or 1e4
    table["max_position_embeddings"] = _field(reader, f"{kind}.context_length") or 2048
    if kind == "llama":
        table["attention_bias"] = "blk.0.attn_q.bias" in tensors
    for name in ("bos", "eos"):
        if (id := _field(reader, f"tokenizer.ggml.{name}_token_id")) is not None:
            table[f"{name}_token_id"] = id
    experts, head = _field(reader, f"{kind}.expert_count"), table["head_dim"]
    rotated = _field(reader, f"{kind}.rope.dimension_count") or head
    value = _field(reader, f"{kind}.attention.value_length") or table["hidden_size"] // heads
    strange = {
        f"{experts} experts": experts,
        f"{rotated} rotary dims of {head}": rotated != head,
        f"values of {value} dims beside keys of {head}": value != head,
        "attention that is not causal": _field(reader, f"{kind}.attention.causal") is False,
    }
    if found := [what for what, there in strange.items() if there]:
        raise unread(path, " and ".join(found))
    frequencies = _floats(path, tensors[FREQUENCIES]) if kind == "llama" and FREQUENCIES in tensors else None
    keys = {key: _field(reader, key) for key in reader.fields if key.startswith(f"{kind}.rope.")}
    if scaling := rope_scaling(path, keys, table, frequencies):
        table["rope_scaling"] = scaling
    return table | {"torch_dtype": "float32"}


def _names(path: Path, reader: Any, table: dict) -> dict[str, str]:
    """Return Hugging Face's name of each tensor. ValueError for one that is missing or left over."""
    biases = BIASES | OUTPUT_BIAS if table.get("attention_bias") else {}
    names = ENDS | ({} if table["tie_word_embeddings"] else HEAD)
    for i in range(table["num_hidden_layers"]):
        layer = LAYER | ALWAYS.get(table["model_type"], biases)
        names |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in layer.items()}
    there = {tensor.name for tensor in reader.tensors} - ({FREQUENCIES} if table["model_type"] == "llama" else set())
    for what, left in (("lacks", names.keys() - there), ("has, and its architecture has not,", there - names.keys())):
        if left:
            raise ValueError(
                f"{path}: {what} the tensor {min(left)}" + (f" (and {len(left) - 1} more)" if len(left) > 1 else "")
                + "\n  fix: give the model's Hugging Face folder, or its name on the hub"
            )  # fmt: skip
    return names


def _floats(path: Path, tensor: Any) -> numpy.ndarray:
    """Return a tensor's values, dequantized. ValueError for a quantization that the library cannot read."""
    from gguf import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32, copy=False)
    except NotImplementedError:
        raise ValueError(
            f"{path}: {tensor.name} is quantized as {tensor.tensor_type.name}, which the library gguf cannot read"
            "\n  fix: pip install -U gguf, or give a file of another quantization, Q8_0 say"
        ) from None


def _tensors(path: Path, reader: Any, names: dict[str, str], table: dict) -> Iterator[tuple[str, numpy.ndarray]]:
    heads = {"q_proj": table["num_attention_heads"], "k_proj": table["num_key_value_heads"]}
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        if tensor.name not in names:
            continue
        name, values = names[tensor.name], _floats(path, tensor)
        if table["model_type"] == "llama":
            for projection, n in heads.items():
                if f".{projection}." in name:
                    values = unpermuted(values, n)
        yield name, numpy.ascontiguousarray(values)


def unpermuted(rows: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Return rows of queries or keys in Hugging Face's order.

    llama.cpp puts row i of the first half of a head's rows beside row i of the second half.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_tensors(folder: Path, path: Path, tensors: Iterator[tuple[str, numpy.ndarray]]) -> None:
    """Write a file for each layer, one for the ends, and their index."""
    with needing(f"{path}:", "gguf"):
        from safetensors.numpy import save_file
    where, size, held, last = {}, 0, {}, ""

    def write() -> None:
        if held:
            save_file(held, folder / last, metadata={"format": "pt"})

    for name, values in tensors:
        part = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        if (file := f"model-{part}.safetensors") != last:
            write()
            held, last = {}, file
        held[name], where[name], size = values, file, size + values.nbytes
    write()
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


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
    """Return the rope_scaling that gives the file's factors of frequencies. ValueError if no known one does."""
    f = table["rope_theta"] ** (-numpy.arange(0, table["head_dim"], 2) / table["head_dim"])
    for factor, low, high, original in SCALINGS:
        if numpy.allclose(given, f / RopeScaling("llama3", factor, low, high, original).slowed(f)):
            names = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor} | names
    raise ValueError(
        f"{path}: {FREQUENCIES} is of no scaling known here (Llama 3.1, Llama 3.2)"
        "\n  fix: give the model's Hugging Face folder, or its name on the hub"
    )
