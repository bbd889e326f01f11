"""What Hugging Face's classes say of random weights: the small table that the suite compares with.

    pip install transformers safetensors
    python tests/oracles/hugging_face.py            # prints how far the stored one is; --write stores the table

Each config is written there by save_pretrained and read here; params are made here, written by `hf.save`, and read
there; their gradients come back by save_pretrained and `hf.load`. Their casts to float32 (norms, rotary tables,
softmax, loss) are casts to float64.

    python tests/oracles/hugging_face.py --bf16     # how far logits in bfloat16 are from float32's, theirs and ours

An error is the norm of a text's logits in bfloat16 minus those in float32, over the norm of the latter; both computed
from the same params, which are rounded to bfloat16 first. The bound is the upper end of the 95% interval of the mean of
ours minus theirs, and may not be above 0.
"""

import json
import sys
import tempfile
from pathlib import Path

import optree
import torch
import transformers

from scaling.common.console import Parser
from scaling.configs import load
from scaling.configs.hugging_face_write import write_config
from scaling.models import hf

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from probes import MORE, TEXTS, bound_of, of_bf16, probes, read_cases, relative_errors, rounded, wide
from probes import shaken as params_of

TABLE = Path(__file__).parents[1] / "models" / "hugging_face.json"
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "head_dim": 4, "num_experts_per_tok": 3, "first_k_dense_replace": 0}
LATENT |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 24}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
GLM4_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}
GLM4_MOE |= {"num_hidden_layers": 3}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5}
SCALES |= {"attention_multiplier": 0.2}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
EAGER |= {"pad_token_id": None}  # an embedding of padding has no gradient there
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
STRETCHED = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e3}
LONGROPE = {"rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.1, 1.7], "long_factor": [1.3, 4.0]}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5, "swiglu_limit": 0.3}
NEXT = {"num_hidden_layers": 4, "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
NEXT |= {"linear_key_head_dim": 6, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 20}
LLAMA4 = {"num_hidden_layers": 3, "intermediate_size_mlp": 24, "num_local_experts": 8, "attention_chunk_size": 5}
LLAMA4 |= {"no_rope_layers": [1, 0, 1], "floor_scale": 4, "attn_scale": 0.7, "tie_word_embeddings": False}
OF_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}


CLASSES = """
llama: Llama()
llama tied: Llama(tie_word_embeddings=True)
llama K=N: Llama(num_key_value_heads=4)
llama K=1: Llama(num_key_value_heads=1)
llama NH != D: Llama(head_dim=12, rms_norm_eps=1e-3)
llama 3.1: Llama(rope_parameters=LLAMA3)
llama linear: Llama(rope_parameters={'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 1e4})
llama biases, gelu: Llama(attention_bias=True, hidden_act='gelu_pytorch_tanh')
mistral: Mistral(sliding_window=5)
qwen2: Qwen2(tie_word_embeddings=True)
qwen2 windows: Qwen2(use_sliding_window=True, sliding_window=3, max_window_layers=1)
qwen3: Qwen3()
qwen3 biases: Qwen3(attention_bias=True)
mixtral: Mixtral(num_local_experts=6, num_experts_per_tok=2)
qwen3 moe: Qwen3Moe(EXPERTS)
qwen3 moe normed: Qwen3Moe(EXPERTS, norm_topk_prob=True)
phi3: Phi3(sliding_window=5)
ernie 4.5: Ernie4_5()
helium: Helium(num_key_value_heads=4)
gemma: Gemma()
granite: Granite(SCALES)
granite tied, biases: Granite(SCALES, tie_word_embeddings=True, attention_bias=True)
smollm3: SmolLM3(no_rope_layers=[1, 0], num_key_value_heads=2)
smollm3 windows: SmolLM3(pad_token_id=None, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=4)
llama yarn: Llama(rope_parameters=YARN)
deepseek: DeepseekV3(LATENT)
deepseek dense, halves: DeepseekV3(LATENT, first_k_dense_replace=2, rope_interleave=False)
deepseek dense first: DeepseekV3(LATENT, first_k_dense_replace=1, num_hidden_layers=3)
deepseek yarn: DeepseekV3(LATENT, rope_parameters=YARN | {'mscale': 0.8, 'mscale_all_dim': 1.2})
glm4 moe lite: Glm4MoeLite({key: LATENT[key] for key in LATENT if key != 'first_k_dense_replace'},
    num_hidden_layers=3)
qwen2 moe: Qwen2Moe(EXPERTS, shared_expert_intermediate_size=20)
granite moe: GraniteMoe(SCALES, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=True)
glm4 moe: Glm4Moe(GLM4_MOE)
glm4 moe normed: Glm4Moe(GLM4_MOE, use_qk_norm=True, attention_bias=True, n_shared_experts=2)
seed oss: SeedOss(attention_out_bias=True)
phi3 part: Phi3(partial_rotary_factor=0.5, num_key_value_heads=1)
llama mlp biases: Llama(mlp_bias=True)
deepseek v2: DeepseekV2(LATENT, topk_method='group_limited_greedy', num_hidden_layers=3)
deepseek v2 lite: DeepseekV2(LATENT, q_lora_rank=None, num_hidden_layers=3)
deepseek v2 greedy, yarn: DeepseekV2(LATENT, rope_parameters=YARN | {'mscale': 0.8, 'mscale_all_dim': 1.2},
    first_k_dense_replace=1, routed_scaling_factor=2.0)
olmo2: Olmo2(num_key_value_heads=2)
olmo3: Olmo3(sliding_window=5, num_hidden_layers=4, rope_parameters=OF_KINDS)
olmoe: Olmoe(num_experts=8, num_experts_per_tok=3)
gemma3: Gemma3Text(sliding_window=5, num_hidden_layers=3, sliding_window_pattern=2, query_pre_attn_scalar=11,
    rope_parameters=OF_KINDS)
gemma2: Gemma2(sliding_window=5, query_pre_attn_scalar=5, attn_logit_softcapping=0.3, final_logit_softcapping=0.7)
gpt oss: GptOss(GPT_OSS, rope_parameters=YARN | {'truncate': False})
glm: Glm()
glm4: Glm4(attention_bias=False)
starcoder2: Starcoder2(sliding_window=5)
stablelm: StableLm(use_qkv_bias=True)
stablelm parallel: StableLm(use_parallel_residual=True, partial_rotary_factor=0.5)
gpt neox: GPTNeoX(num_key_value_heads=4)
gpt neox in turn: GPTNeoX(use_parallel_residual=False, attention_bias=False, num_key_value_heads=4)
cohere: Cohere(logit_scale=0.3, attention_bias=True)
cohere2: Cohere2(logit_scale=0.25, sliding_window=5, num_hidden_layers=4)
qwen3 next: Qwen3Next(EXPERTS | NEXT)
qwen3 next dense: Qwen3Next(NEXT, mlp_only_layers=[0, 1, 2, 3], linear_num_value_heads=2)
cohere norms: Cohere(use_qk_norm=True)
stablelm norms: StableLm(qk_layernorm=True)
nemotron: Nemotron(attention_bias=True, mlp_bias=True)
arcee: Arcee(mlp_bias=True, rope_parameters=YARN)
apertus: Apertus(attention_bias=True)
vaultgemma: VaultGemma(sliding_window=5, query_pre_attn_scalar=5, attn_logit_softcapping=0.3)
hunyuan: HunYuanDenseV1(tie_word_embeddings=True, rope_parameters=STRETCHED)
phi3 short: Phi3(rope_parameters=LONGROPE | {'partial_rotary_factor': 0.5}, original_max_position_embeddings=32)
phi3 long: Phi3(rope_parameters=LONGROPE | {'attention_factor': 1.2, 'partial_rotary_factor': 0.5},
    original_max_position_embeddings=16)
gpt2: GPT2(n_inner=40, scale_attn_by_inverse_layer_idx=False)
phi: Phi(num_key_value_heads=2, partial_rotary_factor=0.5)
olmo: Olmo(clip_qkv=0.7)
olmoe clipped: Olmoe(num_experts=8, num_experts_per_tok=3, clip_qkv=0.8)
llama4: Llama4Text(LLAMA4, rope_parameters=LLAMA3)
llama4 dense between: Llama4Text(LLAMA4, moe_layers=[2, 0], num_experts_per_tok=2, attention_bias=True)
llama4 bare: Llama4Text(LLAMA4, use_qk_norm=False, attn_temperature_tuning=False)
exaone4: Exaone4(sliding_window=5, num_hidden_layers=4)
"""
CASES = read_cases(CLASSES, globals())


def theirs(model, tokens):
    """(loss, gradients as params are laid out here); the model's values are its gradients afterwards."""
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    # the biases of choices of experts: no gradient reaches them
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for p in (*model.parameters(), *biases):
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        model.save_pretrained(folder)
        return loss.item(), hf.load(folder)[1]


def reference(name: str, tokens) -> dict:
    """What the suite compares with: their loss and gradients on params that it can make itself."""
    kind, options = CASES[name]
    with tempfile.TemporaryDirectory() as folder, wide():
        config = getattr(transformers, f"{kind}Config")(**(SMALL | options | EAGER))
        named = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind.removesuffix('Text')}ForCausalLM")
        getattr(transformers, named)(config).save_pretrained(folder)
        config = load(Path(folder) / "config.json")
        table = json.loads((Path(folder) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, config, params_of(config))
        with wide():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER)
            loss, grads = theirs(model, tokens)
    return {"written": table, "published": write_config(config), "loss": loss, "grads": probes(grads)}


def apart(a, b) -> float:
    """How far the losses and gradients of two rows are apart, over the largest."""
    a, b = (torch.tensor(optree.tree_leaves([row.get(k) for k in ("loss", "grads", "probes")])) for row in (a, b))
    return ((a - b).abs() / b.abs().max()).max().item()


ROUNDED = "llama qwen3 gemma olmo2 starcoder2 mixtral deepseek".split()  # noqa: SIM905


def rounding(write: bool) -> bool:
    """Print the errors of both sides, and store theirs if asked to; return whether a bound is too high."""
    table, found, failed = json.loads(TABLE.read_text()), {}, False
    print(f"{'model':<12} {'theirs':>9} {'ours':>9} {'bound / theirs':>15}")
    for name in ROUNDED:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            (path := Path(folder) / "config.json").write_text(json.dumps(table[name]["written"]))
            hf.save(folder, config := load(path), rounded(config))
            classes = transformers.AutoModelForCausalLM
            models = (
                classes.from_pretrained(folder, dtype=dtype, **EAGER) for dtype in (torch.bfloat16, torch.float32)
            )
            found[name] = relative_errors(*(model(TEXTS).logits for model in models))
        ours, mean = of_bf16(config), sum(found[name]) / len(TEXTS)
        bound = bound_of(ours, found[name]) / mean
        failed |= bound > MORE.get(name, 0)
        print(f"{name:<12} {mean:9.5f} {sum(ours) / len(TEXTS):9.5f} {bound:15.2%}", flush=True)
    if write:
        errors = {name: [round(e, 7) for e in some] for name, some in found.items()}
        TABLE.with_name("accuracy.json").write_text(json.dumps(errors) + "\n")
    return failed


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the table that the suite compares with")
    parser.add_argument("--only", default="", help="the cases whose names begin so; others stay as they are stored")
    parser.add_argument("--bf16", action="store_true", help="the errors of logits in bfloat16 instead")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if asked.bf16:
        return int(rounding(asked.write))
    tokens = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(0))
    models = {name: reference(name, tokens) for name in CASES if name.startswith(asked.only)}
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; differences over the largest value")
    stored = json.loads(TABLE.read_text())
    for name, row in models.items():
        print(f"{name:30} {apart(row, stored[name]):.1e}" if name in stored else f"{name:30} new")
    if asked.write:
        kept = {name: (stored | models)[name] for name in CASES if name in stored | models}
        TABLE.write_text(json.dumps(kept, indent=1) + "\n")
        print("wrote", TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
