"""How far logits in bfloat16 are from float32's: those of Hugging Face's classes, with which the suite compares ours.

    pip install transformers safetensors
    python tests/oracles/accuracy.py            # prints a line for each model; --write stores their errors

An error is the norm of a text's logits in bfloat16 minus those in float32, over the norm of the latter; both computed
from the same params, which are rounded to bfloat16 first. The bound is the upper end of the 95% interval of the mean of
ours minus theirs, and may not be above 0.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from hugging_face import EAGER, TABLE

from scaling.common.console import Parser
from scaling.configs import load
from scaling.models import hf

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from probes import MORE, TEXTS, bound_of, of_bf16, relative_errors, rounded

STORED = TABLE.with_name("accuracy.json")
NAMES = ("llama", "qwen3", "gemma", "olmo2", "starcoder2", "mixtral", "deepseek")


def theirs(config) -> list[float]:
    """Each text's error by transformers' class of this config."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        hf.save(folder, config, rounded(config))
        classes = transformers.AutoModelForCausalLM
        models = (classes.from_pretrained(folder, dtype=dtype, **EAGER) for dtype in (torch.bfloat16, torch.float32))
        return relative_errors(*(model(TEXTS).logits for model in models))


def main() -> int:
    """Print the table, and store theirs if asked to; 1 if a bound is too high."""
    parser = Parser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--write", action="store_true", help="store their errors")
    write, table, found, failed = parser.parse_args().write, json.loads(TABLE.read_text()), {}, False
    print(f"{'model':<12} {'theirs':>9} {'ours':>9} {'bound / theirs':>15}")
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(table[name]["written"]))
            config = load(path)
        found[name], ours = theirs(config), of_bf16(config)
        mean = sum(found[name]) / len(TEXTS)
        bound = bound_of(ours, found[name]) / mean
        failed |= bound > MORE.get(name, 0)
        print(f"{name:<12} {mean:9.5f} {sum(ours) / len(TEXTS):9.5f} {bound:15.2%}", flush=True)
    if write:
        STORED.write_text(json.dumps({name: [round(e, 7) for e in errors] for name, errors in found.items()}) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
