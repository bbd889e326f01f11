"""The transformer beside Hugging Face's classes on random weights; and the small table that the suite compares with.

    pip install transformers safetensors
    python tests/oracles/hugging_face.py            # prints how far apart they are; --write stores the table

Each model is born there, saved by save_pretrained, read by `hf.load`, and written again by `hf.save`. In float64 their
casts to float32 (norms, rotary tables, softmax, loss) are lifted; in float32 they are as users have them.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tabulate import tabulate

from scaling import tree
from scaling.book.largest import largest
from scaling.common.console import Parser
from scaling.configs import load
from scaling.configs.hugging_face import write_config
from scaling.models import hf, transformer

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from probes import probes
from probes import shaken as params_of

TABLE = Path(__file__).parents[1] / "models" / "hugging_face.json"
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 0,
}
LATENT |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
CASES = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama K=N": ("Llama", {"num_key_value_heads": 4}),
    "llama K=1": ("Llama", {"num_key_value_heads": 1}),
    "llama NH != D": ("Llama", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama biases, gelu": ("Llama", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3 biases": ("Qwen3", {"attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3 moe": ("Qwen3Moe", {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3 moe normed": (
        "Qwen3Moe",
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "deepseek": ("DeepseekV3", LATENT),
    "deepseek dense, halves": ("DeepseekV3", LATENT | {"first_k_dense_replace": 2, "rope_interleave": False}),
    "deepseek dense first": ("DeepseekV3", LATENT | {"first_k_dense_replace": 1, "num_hidden_layers": 3}),
    "deepseek yarn": ("DeepseekV3", LATENT | {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}}),
}


@contextlib.contextmanager
def wide():
    """Their casts to float32 are casts to float64."""
    kept = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32 = torch.float = kept[0]
        torch.Tensor.float = kept[1]
        torch.set_default_dtype(kept[0])


def build(kind: str, options: dict, attention: str):
    options = {**SMALL, **options, "attn_implementation": attention, "experts_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def shaken(model) -> None:
    """Random values everywhere: gains are not 1, biases not 0."""
    make = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=make, dtype=p.dtype) * 0.3 + ("norm" in name))
        for bias in biases(model):
            bias.copy_(torch.randn(bias.shape, generator=make, dtype=bias.dtype) * 0.1)


def biases(model) -> list:
    """The biases of choices of experts: no gradient reaches them."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def theirs(model, tokens):
    """(logits, loss, gradients as params are laid out here)."""
    model.zero_grad()
    out = model(tokens[:, :-1])
    labelled = model(tokens, labels=tokens)
    labelled.loss.backward()
    with tempfile.TemporaryDirectory() as folder:
        held = [*model.parameters(), *biases(model)]
        values = [p.detach().clone() for p in held]
        with torch.no_grad():
            for p in held:
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
            model.save_pretrained(folder)
            grads = hf.load(folder)[1]
            for p, value in zip(held, values, strict=True):
                p.copy_(value)
    return out.logits.detach(), labelled.loss.detach(), grads


def ours(params, tokens, config):
    logits = transformer.forward(params, tokens[:, :-1], config=config)
    grads, loss = torch.func.grad_and_value(transformer.loss)(params, tokens, config=config)
    return logits, loss, grads


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    most = b.abs().max()
    return ((a - b).abs().max() / torch.where(most == 0, 1, most)).item()


def same_files(a: Path, b: Path) -> bool:
    one, two = ({k: v for path in f.glob("*.safetensors") for k, v in load_file(path).items()} for f in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) and one[k].dtype == two[k].dtype for k in one)


def compare(name: str, tokens) -> tuple:
    kind, options = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        first, again = Path(folder) / "first", Path(folder) / "again"
        with wide():
            model = build(kind, options, "eager")
            shaken(model)
            want = theirs(model, tokens)
            model.save_pretrained(first)
        config, params = hf.load(first)
        got = ours(params, tokens, config)
        far = [apart(got[0], want[0]), apart(got[1], want[1])]
        far.append(largest(tree.leaves(tree.map(apart, got[2], want[2]))))
        hf.save(again, config, params)
        kept = (
            same_files(first, again)
            and load(again / "config.json").with_(name=config.name, source=config.source) == config
        )
        with wide():
            opened = transformers.AutoModelForCausalLM.from_pretrained(
                again, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            )
            kept = kept and torch.equal(opened(tokens[:, :-1]).logits, want[0]) and type(opened) is type(model)

        single = build(kind, options, "sdpa")
        shaken(single)
        single.save_pretrained(first)
        config, params = hf.load(first)
        far.append(apart(transformer.forward(params, tokens[:, :-1], config=config), single(tokens[:, :-1]).logits))
    return name, *far, kept


def reference(name: str, tokens) -> dict:
    """What the suite compares with: their loss and gradients on params that it can make itself."""
    kind, options = CASES[name]
    with tempfile.TemporaryDirectory() as folder, wide():
        model = build(kind, options, "eager")
        model.save_pretrained(folder)
        config = load(Path(folder) / "config.json")
        table = json.loads((Path(folder) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, config, params_of(config))
        with wide():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            )
            _, loss, grads = theirs(model, tokens)
    return {"written": table, "published": write_config(config), "loss": loss.item(), "grads": probes(grads)}


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the table that the suite compares with")
    write = parser.parse_args().write
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(0))
    rows = [compare(name, tokens) for name in CASES]
    heads = ["model", "logits f64", "loss f64", "worst gradient f64", "logits f32", "same bits, opens there"]
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; differences over the largest value")
    print(tabulate(rows, heads, floatfmt=".1e"))
    if write:
        table = {name: reference(name, tokens) for name in CASES}
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        print("wrote", TABLE)
    return int(not all(largest(row[1:4]) <= 1e-12 and row[4] <= 2e-6 and row[5] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
