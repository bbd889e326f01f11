"""Published transformers by name, each with the source of its sizes (the table of Part 6).

`MODELS` has the book's models and similar ones. `MEASURED` has the models of published runs, with which the planner is
compared.
"""

from scaling.configs.attention import Latent, RopeScaling
from scaling.configs.config import Config

_META = "huggingface.co/meta-llama"
_TOY = Config("part7-toy", 64, 4096, 16384, 32, 8, 256, 32128, tied=True, source="Part 7, Worked Problems")

MODELS = {
    config.name: config
    for config in (
        Config("tiny", 4, 128, 384, 8, 4, 16, 256, source="to try things on: bytes as tokens"),
        Config("llama2-13b", 40, 5120, 13824, 40, 40, 128, 32000, theta=1e4, source="Part 5, Some Problems to Work"),
        Config("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, source=f"{_META}/Meta-Llama-3-8B config.json"),
        Config("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, source="Part 6, What does LLaMA 3 look like?"),
        Config(
            "llama3-405b", 126, 16384, 53248, 128, 8, 128, 128256, rope_scaling=RopeScaling("llama3", 8.0),
            source=f"{_META}/Llama-3.1-405B config.json",
        ),
        Config(
            "gemma-7b", 28, 3072, 24576, 16, 16, 256, 256000, tied=True, theta=1e4, eps=1e-6, activation="gelu_tanh",
            unit_offset=True, embed_scale=3072**0.5, source="huggingface.co/google/gemma-7b",
        ),
        Config(
            "gemma2-27b", 46, 4608, 36864, 32, 16, 128, 256000, tied=True, norms="both", theta=1e4, eps=1e-6,
            window=(4096, None) * 23, activation="gelu_tanh", unit_offset=True, embed_scale=4608**0.5,
            score_scale=144**-0.5, score_cap=50.0, logit_cap=30.0,
            source="Part 4 gives D; the rest huggingface.co/google/gemma-2-27b",
        ),
        Config(
            "mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, E=8, k=2, theta=1e6,
            source="huggingface.co/mistralai/Mixtral-8x7B-v0.1",
        ),
        Config(
            "deepseek-v3", 61, 7168, 2048, 128, 128, 128, 129280, E=256, k=8, shared=1, dense_layers=3, F_dense=18432,
            routing="sigmoid", expert_groups=8, top_groups=4, routed_scale=2.5, theta=1e4, eps=1e-6,
            latent=Latent(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128), dtype="fp8",
            source="Part 4 and Part 12 give E, k; the rest arxiv.org/abs/2412.19437, section 4.2",
        ),
        Config("part4-q1", 64, 4096, 16384, 32, 32, 128, 32000, source="Part 4, Question 1 (N*H = D, H = 128 assumed)"),
        _TOY,
        _TOY.with_(name="part7-moe", E=16, k=2, source="Part 7, Question 5"),
    )
}  # fmt: skip

_MPT: dict = {"gated": False, "tied": True, "source": "github.com/mosaicml/llm-foundry, scripts/train/benchmarking"}
_MAXTEXT: dict = {"source": "github.com/AI-Hypercomputer/maxtext"}
_KORTHIKANTI: dict = {"gated": False, "tied": True, "source": "arXiv:2205.05198, Table 3"}
_QWEN3_MOE: dict = {"E": 128, "k": 8, "theta": 1e6, "eps": 1e-6, "qk_norm": True}
_MEGATRON: dict = {"gated": False, "source": "github.com/NVIDIA/Megatron-LM, README"}
MEASURED = {
    config.name: config
    for config in (
        Config("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, theta=1e4, source="arXiv:2307.09288"),
        Config("llama2-70b", 80, 8192, 28672, 64, 8, 128, 32000, theta=1e4, source="arXiv:2307.09288"),
        Config("palm-540b", 118, 18432, 73728, 48, 1, 256, 256000, tied=True, source="arXiv:2204.02311, section 2"),
        Config("gpt3-175b", 96, 12288, 49152, 96, 96, 128, 51200, gated=False, tied=True, source="arXiv:2005.14165"),
        Config("maxtext-32b", 32, 8192, 28672, 64, 64, 128, 32000, **_MAXTEXT),
        Config("maxtext-64b", 64, 8192, 28672, 64, 64, 128, 32000, **_MAXTEXT),
        Config("maxtext-128b", 64, 8192, 57344, 128, 128, 128, 32000, **_MAXTEXT),
        Config("maxtext-256b", 64, 16384, 57344, 128, 128, 128, 32000, **_MAXTEXT),
        Config("maxtext-1024b", 128, 16384, 114688, 256, 256, 128, 32000, **_MAXTEXT),
        Config("mpt-7b", 32, 4096, 16384, 32, 32, 128, 50368, **_MPT),
        Config("mpt-30b", 48, 7168, 28672, 56, 56, 128, 50368, **_MPT),
        Config("mpt-70b", 80, 8192, 32768, 64, 64, 128, 50368, **_MPT),
        Config("gpt-22b", 48, 6144, 24576, 64, 64, 96, 51200, **_KORTHIKANTI),
        Config("gpt-530b", 105, 20480, 81920, 128, 128, 160, 51200, **_KORTHIKANTI),
        Config(
            "bloom-176b", 70, 14336, 57344, 112, 112, 128, 250880, gated=False, tied=True, source="arXiv:2211.05100"
        ),
        Config(
            "qwen3-30b", 48, 2048, 768, 32, 4, 128, 151936, **_QWEN3_MOE, source="huggingface.co/Qwen/Qwen3-30B-A3B"
        ),
        Config(
            "qwen3-235b", 94, 4096, 1536, 64, 4, 128, 151936, **_QWEN3_MOE, source="huggingface.co/Qwen/Qwen3-235B-A22B"
        ),
        Config("megatron-1.7b", 24, 2048, 8192, 16, 16, 128, 131072, **_MEGATRON),
        Config("megatron-7.1b", 30, 4096, 16384, 32, 32, 128, 131072, **_MEGATRON),
        Config("megatron-16b", 32, 6144, 24576, 48, 48, 128, 131072, **_MEGATRON),
        Config("megatron-32b", 48, 7168, 28672, 56, 56, 128, 131072, **_MEGATRON),
        Config("megatron-70b", 84, 8192, 32768, 64, 64, 128, 131072, **_MEGATRON),
        Config("megatron-119b", 92, 10240, 40960, 80, 80, 128, 131072, **_MEGATRON),
        Config("megatron-177b", 96, 12288, 49152, 96, 96, 128, 131072, **_MEGATRON),
        Config("megatron-314b", 96, 16384, 65536, 128, 128, 128, 131072, **_MEGATRON),
        Config("megatron-462b", 112, 18432, 73728, 144, 144, 128, 131072, **_MEGATRON),
    )
}
