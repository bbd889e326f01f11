"""Latent attention, linear attention and scaled rotary positions, as a Config has them."""

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from scaling.common.arguments import check_fields, check_within, of_type

NAMES = {"original_max_position_embeddings": "original", "mscale": "mscale", "mscale_all_dim": "mscale_all"}
NAMES_OF = {  # Hugging Face's names of a RopeScaling's numbers, by its kind
    "llama3": {"low_freq_factor": "low", "high_freq_factor": "high"},
    "yarn": {"beta_slow": "low", "beta_fast": "high", "attention_factor": "attention", "truncate": "truncate"},
    "longrope": {"short_factor": "short", "long_factor": "long", "attention_factor": "attention"},
}
NEEDED = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low", "high")}  # of a RopeScaling


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2 and V3): Q and KV pass through low ranks, and KV's is cached.

    With a `q_rank` of 0, queries are projected from the stream itself (DeepSeek-V2-Lite). Per head, queries and keys
    have `nope` + `rope` dims (all heads share the `rope` part of the keys), and values have `value` dims. With
    `interleaved`, the two coordinates of a rotary plane are neighbours, not H/2 apart.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True

    def __post_init__(self):
        sizes = ("q_rank", "kv_rank", "nope", "rope", "value")
        check_fields(self, "latent ", dict.fromkeys(sizes, "[1, inf)") | {"q_rank": "[0, inf)"})
        if self.rope % 2:
            raise ValueError(f"latent rope is {self.rope}: planes have two dims\n  fix: give an even number")


@dataclass(frozen=True)
class Linear:
    """Linear attention by the gated delta rule (Qwen3-Next): some layers have a state in place of a cache.

    They have `keys` heads of queries and keys, `key` dims wide, and `values` heads of values and states, `value` wide.
    Queries, keys and values first pass a causal convolution over `width` tokens. `layers` are the numbers of the layers
    that are linear; the others have attention as the rest of the Config says.
    """

    keys: int
    values: int
    key: int
    value: int
    width: int
    layers: tuple[int, ...]

    def __post_init__(self):
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        sizes = dict.fromkeys(("keys", "values", "key", "value"), "[1, 1e9]")
        check_fields(self, "linear ", sizes | {"width": "[2, 1e9]"})
        if self.values % self.keys:
            what = f"linear: {self.keys} heads of keys must divide {self.values} of values"
            raise ValueError(f"{what}\n  fix: give keys a divisor of values")

    @property
    def sizes(self) -> dict[str, int]:
        """The dims of the params of linear layers by letter, as in `leaves.LINEAR`."""
        each = self.values // self.keys
        found = {"l": len(self.layers), "n": self.values, "k": self.keys, "h": self.key, "v": self.value}
        found |= {"w": self.width, "m": 2 * (self.key + each * self.value), "u": 2 * each}
        return found | {"t": self.width - 1, "c": 2 * self.key + each * self.value}


def attention_of(kind: Any, name: str, table: dict) -> Any:
    """Return the Latent or Linear, `kind`, from a table with its fields as keys; `name` is the table's in a file."""
    names = {field.name for field in fields(kind) if field.default is MISSING}
    if table.keys() - ({field.name for field in fields(kind)} - names) != names:
        raise ValueError(f"{name} has {', '.join(table) or 'nothing'}\n  fix: give {', '.join(sorted(names))}")
    return kind(**table)


@dataclass(frozen=True)
class RopeScaling:
    """A change of rotary frequencies for longer contexts: `kind` linear, llama3, yarn, longrope, or one not computed.

    linear divides every position by `factor`. llama3 makes wavelengths beyond original / low `factor` times as long,
    keeps wavelengths below original / high, and interpolates in between. `original` is the context of earlier training.
    yarn slows planes that turn fewer than `low` times in the original context by `factor`, and keeps planes that turn
    more than `high` times; with `truncate` the ramp between both starts and ends at whole planes. Rotated dims are
    multiplied by `attention` if it is given, else by s(`mscale`) / s(`mscale_all`) with s(m) = 0.1 m ln(factor) + 1, or
    by s(1) if one of the two is 0. Latent attention multiplies all dims by s(`mscale_all`).
    longrope divides each plane's frequency by its own number of `short`, or of `long` in a text of more than `original`
    tokens, and multiplies rotated dims by `attention`; None is sqrt(1 + ln(factor) / ln(original)) (Ding et al. 2024,
    arxiv.org/abs/2402.13753).
    """

    kind: str
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: float = 8192
    mscale: float = 0.0
    mscale_all: float = 0.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    attention: float | None = None

    @staticmethod
    def of(table: dict) -> "RopeScaling | None":
        """Return the scaling of a table with these names or Hugging Face's: {"rope_type": "llama3", "factor": 8.0}.

        None for the type "default". ValueError if a number is missing for which Hugging Face has no default.
        """
        kind = next((table[key] for key in ("rope_type", "type", "kind") if key in table), "default")
        of_type("rope_scaling: its type", kind, str)
        if kind == "default":
            return None
        names = NAMES | NAMES_OF.get(kind, {})
        given = {names.get(key, key): value for key, value in table.items() if value is not None}
        needed = ("factor",) if kind == "llama3" and "kind" in table else NEEDED.get(kind, ())
        if missing := [name for name in needed if name not in given]:
            theirs = {ours: name for name, ours in names.items()}
            raise ValueError(
                f"rope_scaling of type {kind!r} lacks its {theirs.get(missing[0], missing[0])}\n  fix: add it"
            )
        if kind == "yarn":
            given |= {name: given.get(name) or usual for name, usual in (("low", 1.0), ("high", 32.0))}
        numbers = [field.name for field in fields(RopeScaling) if field.name != "kind"]
        numbers = ["factor", "original", "short", "long", "attention"] if kind == "longrope" else numbers
        return RopeScaling(kind, **{key: given[key] for key in numbers if key in given})

    @property
    def short_texts(self) -> int | None:
        """The tokens of the longest text for which longrope uses its short factors; None for other kinds."""
        return math.floor(self.original) if self.kind == "longrope" else None

    def factors(self, length: int) -> tuple[float, ...]:
        """Return by how much longrope divides each plane's frequency in a text of `length` tokens."""
        return self.long if length > self.original else self.short

    def slowed(self, f: Any) -> Any:
        """Return frequencies of torch or numpy, slowed as in Llama 3.1.

        Frequencies that turn `high` times or more in the original context are kept, frequencies below `low` turns are
        divided by `factor`, and the others are interpolated.
        """
        kept = ((self.original * f / (2 * math.pi) - self.low) / (self.high - self.low)).clip(0, 1)
        return f * (kept + (1 - kept) / self.factor)

    def __post_init__(self):
        for name in ("short", "long"):
            if isinstance(numbers := getattr(self, name), list):
                object.__setattr__(self, name, tuple(numbers))
        within: dict[str, str | tuple] = dict.fromkeys(("factor", "low", "high", "original"), "(0, inf)")
        within |= {"original": "(1, inf)"} if self.kind == "longrope" else {}
        check_fields(self, "rope_scaling ", within | dict.fromkeys(("mscale", "mscale_all", "attention"), "[0, inf)"))
        for number in (*self.short, *self.long):
            of_type("rope_scaling: a factor", number, float)
            check_within("rope_scaling: a factor", number, "(0, inf)")
        if self.kind == "llama3" and self.low >= self.high:
            raise ValueError(
                f"rope_scaling: low_freq_factor={self.low} is not below high_freq_factor={self.high}"
                "\n  fix: give a smaller and a larger one"
            )
