"""Each model_type's class in transformers: the keys of config.json that it reads, and its names of tensors in files.

A class reads the keys that it names and ignores all others, so a `sliding_window` in a Llama's file changes nothing. A
key that the file leaves out has the class's default. The classes are in model_types.toml, which
`tests/models/test_config_keys.py` compares with transformers.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


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
