"""Transformers as data, in the book's letters (Part 4, "Transformer Accounting"; the table of Part 6).

L layers, D d_model, F d_ff, N query heads, K KV heads, H head dim, V vocabulary, E experts of which k are active.
`get("llama3-70b")` looks a model up; `load("config.json")` reads a model's own file. Plain Python: no torch.
"""

import json
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from scaling.spec import dtype_bytes


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2 and V3): Q and KV pass through low ranks; KV's is what is cached.

    Per head, queries and keys have `nope` + `rope` dims (the `rope` part of the keys is shared by all heads), values
    have `value` dims.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Config:
    """One decoder-only transformer. Defaults: dense (E = k = 1), gated MLP of 3 matrices, separate unembedding.

    A mixture of experts has E routed experts of width F, k of them active per token, and `shared` experts that always
    are; its first `dense_layers` layers have a dense MLP of width `F_dense` instead. `routing` is "softmax" (Mixtral)
    or "sigmoid" (DeepSeek-V3): a token's k weights are its scores, with `norm_topk` over their sum, times
    `routed_scale`; its experts come from the best `top_groups` of `expert_groups`. With a `capacity` an expert takes
    at most capacity * tokens * k / E tokens, rounded up; None drops none. `aux_coef` and `z_coef` weigh the losses that
    balance the load and keep the logits small. `norms` counts the layer's norms, `dtype` the stored parameters.
    `source` says where the numbers come from.
    """

    name: str
    L: int
    D: int
    F: int
    N: int
    K: int
    H: int
    V: int
    gated: bool = True
    tied: bool = False
    E: int = 1
    k: int = 1
    shared: int = 0
    dense_layers: int = 0
    F_dense: int = 0
    norms: int = 2
    routing: str = "softmax"
    expert_groups: int = 1
    top_groups: int = 1
    norm_topk: bool = True
    routed_scale: float = 1.0
    capacity: float | None = None
    aux_coef: float = 0.0
    z_coef: float = 0.0
    latent: Latent | None = None
    dtype: str = "bf16"
    source: str = ""

    def __post_init__(self):
        for letter in "LDFNKHVEk":
            value = getattr(self, letter)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{self.name}: {letter} must be a whole number of at least 1, got {value!r}")
        if self.N % self.K:
            raise ValueError(f"{self.name}: K={self.K} KV heads must divide N={self.N} query heads")
        if self.k > self.E:
            raise ValueError(f"{self.name}: {self.k} experts cannot be active of E={self.E}")
        if not 0 <= self.dense_layers <= self.L or (self.dense_layers and self.F_dense < 1):
            raise ValueError(f"{self.name}: dense_layers must lie in 0..L={self.L}, and they need an F_dense")
        dtype_bytes(self.dtype)
        self._check_routing()

    def _check_routing(self) -> None:
        if self.routing not in ("softmax", "sigmoid"):
            raise ValueError(f"{self.name}: unknown routing {self.routing!r}: softmax or sigmoid")
        if self.expert_groups < 1 or self.E % self.expert_groups or not 1 <= self.top_groups <= self.expert_groups:
            raise ValueError(
                f"{self.name}: expert_groups={self.expert_groups} must divide E={self.E}, and top_groups="
                f"{self.top_groups} lie in 1..{self.expert_groups}"
            )
        if self.k > self.top_groups * (self.E // self.expert_groups):
            raise ValueError(f"{self.name}: k={self.k} experts cannot come from {self.top_groups} groups")
        if self.capacity is not None and not 0 < self.capacity < float("inf"):
            raise ValueError(f"{self.name}: capacity must be a factor above 0, or None to drop none: {self.capacity!r}")
        for field in ("aux_coef", "z_coef"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{self.name}: {field} must be at least 0, got {getattr(self, field)!r}")
        if not 0 < self.routed_scale < float("inf"):
            raise ValueError(f"{self.name}: routed_scale must be above 0, got {self.routed_scale!r}")

    @property
    def G(self) -> int:
        """Query heads that share a KV head."""
        return self.N // self.K

    @property
    def matrices(self) -> int:
        """Matrices of one MLP: 3 with a gate, 2 without."""
        return 3 if self.gated else 2

    @property
    def moe(self) -> bool:
        return self.E > 1

    def with_(self, **changes) -> "Config":
        return replace(self, **changes)


_META = "huggingface.co/meta-llama"
_TOY = Config("part7-toy", 64, 4096, 16384, 32, 8, 256, 32128, tied=True, source="Part 7, Worked Problems")

MODELS = {
    config.name: config
    for config in (
        Config("llama2-13b", 40, 5120, 13824, 40, 40, 128, 32000, source="Part 5, Some Problems to Work"),
        Config("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, source=f"{_META}/Meta-Llama-3-8B config.json"),
        Config("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, source="Part 6, What does LLaMA 3 look like?"),
        Config("llama3-405b", 126, 16384, 53248, 128, 8, 128, 128256, source=f"{_META}/Llama-3.1-405B config.json"),
        Config("gemma-7b", 28, 3072, 24576, 16, 16, 256, 256000, tied=True, source="huggingface.co/google/gemma-7b"),
        Config(
            "gemma2-27b", 46, 4608, 36864, 32, 16, 128, 256000, tied=True, norms=4,
            source="Part 4 gives D; the rest huggingface.co/google/gemma-2-27b",
        ),
        Config(
            "mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, E=8, k=2,
            source="huggingface.co/mistralai/Mixtral-8x7B-v0.1",
        ),
        Config(
            "deepseek-v3", 61, 7168, 2048, 128, 128, 128, 129280, E=256, k=8, shared=1, dense_layers=3, F_dense=18432,
            routing="sigmoid", expert_groups=8, top_groups=4, routed_scale=2.5,
            latent=Latent(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128), dtype="fp8",
            source="Part 4 and Part 12 give E, k; the rest arxiv.org/abs/2412.19437, section 4.2",
        ),
        Config("part4-q1", 64, 4096, 16384, 32, 32, 128, 32000, source="Part 4, Question 1 (N*H = D, H = 128 assumed)"),
        _TOY,
        _TOY.with_(name="part7-moe", E=16, k=2, source="Part 7, Question 5"),
    )
}  # fmt: skip


def _letters(name: str) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def get(model: "str | Config") -> Config:
    """The model of this name ("llama3-70b", "LLaMA-3 70B") or of this file (.json, .toml); or a ValueError."""
    if isinstance(model, Config):
        return model
    for name, config in MODELS.items():
        if _letters(name) == _letters(model):
            return config
    if Path(model).suffix in (".json", ".toml"):
        return load(model)
    raise ValueError(f"unknown model {model!r}: give a .json or .toml file, or one of {', '.join(MODELS)}")


_HUGGING_FACE = {
    "L": ("num_hidden_layers",),
    "D": ("hidden_size",),
    "F": ("moe_intermediate_size", "intermediate_size"),
    "N": ("num_attention_heads",),
    "K": ("num_key_value_heads", "num_attention_heads"),
    "H": ("head_dim", "v_head_dim"),
    "V": ("vocab_size",),
    "E": ("n_routed_experts", "num_local_experts", "num_experts"),
    "k": ("num_experts_per_tok",),
    "shared": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "tied": ("tie_word_embeddings",),
    "routing": ("scoring_func",),
    "expert_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "norm_topk": ("norm_topk_prob",),
    "routed_scale": ("routed_scaling_factor",),
}
_UNGATED = ("bloom", "falcon", "gpt_neox", "mpt", "opt", "phi", "starcoder2")


def _hugging_face(table: dict) -> dict:
    """The book's letters from a Hugging Face config.json: LLaMA's kind, Mixtral's, DeepSeek-V3's, Gemma's."""
    table = table.get("text_config", table)  # of a model that also sees
    read = {}
    for letter, keys in _HUGGING_FACE.items():
        if found := [table[key] for key in keys if table.get(key) is not None]:
            read[letter] = found[0]
    kind = table.get("model_type", "llama")
    if "H" not in read and {"D", "N"} <= read.keys():
        read["H"] = read["D"] // read["N"]
    if read.get("dense_layers"):
        read["F_dense"] = table["intermediate_size"]
    if table.get("kv_lora_rank"):
        keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if absent := [key for key in keys if table.get(key) is None]:
            raise ValueError(f"latent attention needs {', '.join(absent)}")
        read["latent"] = Latent(*(table[key] for key in keys))
    if kind == "deepseek_v3":
        read.setdefault("routing", "sigmoid")
    read.setdefault("tied", kind.startswith("gemma"))
    norms = 4 if kind.startswith(("gemma2", "gemma3")) else 2
    return read | {"gated": kind not in _UNGATED, "norms": norms}


def load(path: "str | Path") -> Config:
    """A model from a file: a table in the book's letters (TOML or JSON), or a Hugging Face config.json."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    table = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    if "hidden_size" in table or "text_config" in table:
        table = _hugging_face(table)
    if isinstance(table.get("latent"), dict):
        table["latent"] = Latent(**table["latent"])
    table = {"name": path.stem, "source": str(path)} | table
    names = {field.name for field in fields(Config)}
    missing, unknown = [letter for letter in "LDFNKHV" if letter not in table], sorted(table.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"{path}: lacks {', '.join(missing) or 'nothing'}; does not know {', '.join(unknown) or 'none'}"
        )
    return Config(**table)
