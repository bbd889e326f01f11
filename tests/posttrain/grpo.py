"""A small run of GRPO by the command, and the plain loop on one device with which it is compared."""

import json
import shlex
from pathlib import Path

import torch

from scaling import tree
from scaling.configs import get
from scaling.models import hf, transformer
from scaling.posttrain.command import main
from scaling.posttrain.rewards import number_of
from scaling.serve.sampling import draw_token, uniforms
from scaling.train.batches import epoch_order

SIZES = "L = 2\nD = 16\nF = 24\nN = 4\nK = 2\nH = 8\nV = 256\n"
EXPERTS = SIZES + "E = 4\nk = 2\naux_coef = 0.0\n"
REWARD = """
def score(prompt, answer, row):
    return sum(map(ord, answer)) % 97 / 97 - 0.1 * len(row["prompt"])

def broken(prompt, answer, row):
    return 1 / 0

def nan(prompt, answer, row):
    return float("nan")

def slow(prompt, answer, row):
    import time
    time.sleep(1)

def leaves(prompt, answer, row):
    raise SystemExit(3)

def word(prompt, answer, row):
    return "1.0"

def nothing(prompt, answer, row):
    pass

def endless(prompt, answer, row):
    import threading
    threading.Event().wait()  # a loop would keep a core of the later tests busy
"""
PROMPTS = ["ab", "c", "def", "gh"]
G, SEQ, NEW, EOS, LR = 4, 16, 6, 10, 0.02
STEP = f"--model hf --prompts prompts.jsonl --reward reward.py --seq {SEQ} --max-new-tokens {NEW} --group {G}"
STEP += f" --prompts-per-step 2 --dtype fp64 --lr {LR} --warmup 0 --schedule constant --weight-decay 0 --clip 1000"
STEP += f" --eos-id {EOS} --seed 3"


def write_folder(sizes: str = SIZES):
    """Write a model, prompts and a reward file into the working folder; return (config, params)."""
    Path("model.toml").write_text(sizes)
    Path("reward.py").write_text(REWARD)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    config = get("model.toml")
    params = transformer.init(config, 0, torch.float64)
    hf.save("hf", config, params)
    return config, params


def run(line: str) -> int:
    return main(shlex.split(line))


@torch.no_grad()
def answers(params, config, step):
    """Of a step's prompts the answers, each drawn token by token from the whole sequence's logits."""
    rows = []
    order = [i for epoch in range(10) for i in epoch_order(3, epoch, 4).tolist()]
    for place in range((step - 1) * 2, step * 2):
        for _ in range(G):
            ids, start, old = list(PROMPTS[order[place]].encode()), len(PROMPTS[order[place]]), []
            seed = number_of(3, step, len(rows))
            while len(ids) < start + NEW and (len(ids) == start or ids[-1] != EOS):
                logprobs = transformer.forward(params, torch.tensor([ids]), config=config)[0, -1].log_softmax(-1)
                ids.append(int(draw_token(logprobs.exp()[None], uniforms([seed], [len(ids)]))))
                old.append(float(logprobs[ids[-1]]))
            rows.append((start, ids, old))
    return rows


def plain(config, params, steps, staleness=0, beta=0.0, mean="token", divide=True):
    """The losses and the params of so many steps on one device: autograd and torch's AdamW."""
    first = tree.map(torch.clone, params)
    params = tree.map(lambda W: W.clone().requires_grad_(), params)
    optimizer = torch.optim.AdamW(tree.leaves(params), lr=LR, betas=(0.9, 0.95), weight_decay=0)
    versions, found = [tree.map(lambda W: W.detach().clone(), params)], []
    for n in range(1, steps + 1):
        rows = answers(versions[max(0, n - 1 - staleness)], config, n)
        text = [bytes(ids[start:]).decode(errors="replace") for start, ids, _ in rows]
        rewards = [sum(map(ord, t)) % 97 / 97 - 0.1 * start for t, (start, _, _) in zip(text, rows, strict=True)]
        loss, tokens = torch.zeros((), dtype=torch.float64), sum(len(old) for *_, old in rows)
        for i, (start, ids, old) in enumerate(rows):
            group = torch.tensor(rewards[i // G * G : i // G * G + G], dtype=torch.float64)
            A = (rewards[i] - group.mean()) / (group.std() + 1e-6 if divide else 1)
            inside = torch.tensor([ids[:-1]])
            every = [transformer.forward(W, inside, config=config)[0].log_softmax(-1) for W in (params, first)]
            logp, ref = (x.gather(1, torch.tensor(ids[1:])[:, None])[start - 1 :, 0] for x in every)
            ratio = (logp - torch.tensor(old, dtype=torch.float64)).exp()
            each = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
            each = each + beta * ((ref - logp).exp() - (ref - logp) - 1) if beta else each
            loss = loss + (each.sum() / tokens if mean == "token" else each.mean() / len(rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        versions.append(tree.map(lambda W: W.detach().clone(), params))
        found.append((loss.item(), sum(rewards) / len(rewards)))
    return found, versions[-1]
