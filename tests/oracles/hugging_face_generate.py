"""Greedy completions by Hugging Face's generate, cached and in ragged batches, which the suite compares with ours.

    pip install transformers safetensors
    python tests/oracles/hugging_face_generate.py            # compares; --write stores tests/serve/greedy.json

200 random prompts over four models of random weights, which are ours, saved by `hf.save` and loaded by transformers.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from greedy_table import CONFIGS, NEW, TABLE, params_of, prompts_of

from scaling import serve
from scaling.models import hf

BATCH = 10


def theirs(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in some])  # theirs are padded on the left
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        found += out[:, width:].tolist()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store their completions")
    args = parser.parse_args()
    table, wrong = {}, 0
    for name, config in CONFIGS.items():
        params, prompts = params_of(name), prompts_of(name)
        with tempfile.TemporaryDirectory() as folder:
            hf.save(folder, config, params)
            table[name] = theirs(Path(folder), prompts)
        differ = {
            str(page): sum(
                a != b
                for a, b in zip(serve.generate(params, prompts, config, NEW, page=page), table[name], strict=True)
            )
            for page in (None, 1, 5, 16)
        }
        wrong += sum(differ.values())
        print(f"{name:8} {len(prompts)} prompts, completions that differ by page size: {differ}")
    if args.write:
        rows = ",\n".join(f'"{name}": {json.dumps(rows, separators=(",", ":"))}' for name, rows in table.items())
        TABLE.write_text(f"{{\n{rows}\n}}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
