"""Published transformers by name, each with the source of its sizes (the table of Part 6)."""

from scaling.configs.config import Config, Latent, RopeScaling

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
            uncomputed=("model_type 'gemma'",), source="huggingface.co/google/gemma-7b",
        ),
        Config(
            "gemma2-27b", 46, 4608, 36864, 32, 16, 128, 256000, tied=True, norms=4, theta=1e4, eps=1e-6,
            window=(4096, None) * 23, activation="gelu_tanh",
            uncomputed=("model_type 'gemma2'",),
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
