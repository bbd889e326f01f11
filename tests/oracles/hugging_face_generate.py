"""Greedy completions by Hugging Face's generate, cached and in ragged batches, which the suite compares with ours.

    pip install transformers safetensors
    python tests/oracles/hugging_face_generate.py            # compares; --write stores tests/serve/greedy.json

200 random prompts over four models of random weights, which are ours, saved by `hf.save` and loaded by transformers.
"""

import sys
from pathlib import Path

import torch
import transformers
from completions import compare, stored

BATCH = 10
table = stored.GREEDY


def theirs(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in some])  # theirs are padded on the left
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=table.new, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        found += out[:, width:].tolist()
    return found


if __name__ == "__main__":
    pages = {f"page={page}": {"page": page} for page in (None, 1, 5, 16)}
    sys.exit(compare(__doc__ or "", table, theirs, list, pages))
