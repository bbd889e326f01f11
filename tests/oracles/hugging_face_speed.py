"""Forward and backward on one rank beside Hugging Face's class, uncompiled, with its default attention, in turn.

    pip install transformers safetensors
    python tests/oracles/hugging_face_speed.py [--threads 2] [--steps 20]

Medians, and of the ratios, ours over theirs: by torch.func.grad_and_value, by models.transformer.loss_and_grads, and by
strategies.transformer.loss_and_grads on a mesh of one rank. `--cpu`: the thread's own time, on one thread, where others
use the machine too.
"""

import statistics
import tempfile
import time
from functools import partial

import torch
import transformers
from tabulate import tabulate

from scaling.common.console import Parser
from scaling.mesh import Mesh
from scaling.models import hf, transformer
from scaling.strategies import transformer as strategy

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SIZES |= {"num_hidden_layers": 4, "intermediate_size": 1408, "vocab_size": 4096}
TINY = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
TINY |= {"num_hidden_layers": 4, "intermediate_size": 384, "vocab_size": 4096}


def steps_of(sizes: dict, B: int, T: int) -> dict:
    """Each a call that computes a loss and all gradients of the same model on the same tokens."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config, params = hf.load(folder)
    tokens = torch.randint(config.V, (B, T + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    mesh = Mesh({"X": 1})
    loss = partial(transformer.loss, config=config)

    def theirs():
        model.zero_grad(set_to_none=True)
        model(inputs, labels=inputs, shift_labels=targets).loss.backward()

    return {
        "theirs": theirs,
        "torch.func": lambda: torch.func.grad_and_value(loss)(params, tokens),
        "loss_and_grads": lambda: transformer.loss_and_grads(params, tokens, config=config),
        "strategy": lambda: strategy.loss_and_grads(params, inputs, targets, config, mesh),
    }


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    clock = time.thread_time if args.cpu else time.perf_counter
    args.threads = 1 if args.cpu else args.threads
    torch.set_num_threads(args.threads)
    rows = []
    for name, sizes, B, T in [("D=512, 2 x 256", SIZES, 2, 256), ("D=128, 2 x 64", TINY, 2, 64)]:
        steps = steps_of(sizes, B, T)
        times = {step: [] for step in steps}
        for round_ in range(args.steps + 2):
            for step, run in steps.items():
                start = clock()
                run()
                if round_ >= 2:
                    times[step].append(1000 * (clock() - start))
        for step in ("torch.func", "loss_and_grads", "strategy"):
            ratios = sorted(a / b for a, b in zip(times[step], times["theirs"], strict=True))
            middle = [statistics.median(times[k]) for k in (step, "theirs")]
            quartiles = f"[{ratios[len(ratios) // 4]:.2f}, {ratios[3 * len(ratios) // 4]:.2f}]"
            rows.append((name, step, *middle, statistics.median(ratios), quartiles))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {args.threads} threads, float32")
    print(tabulate(rows, ["size", "ours by", "ms", "theirs", "ratio", "quartiles"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
