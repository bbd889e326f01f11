"""Prefill and decode beside Hugging Face's class, uncompiled, with its default attention, in turn on the same threads;
and requests of many lengths by continuous batching, beside its `generate_batch`.

    pip install transformers safetensors
    python tests/benchmarks/decode.py [--steps 16] [--batch 1 8 64] [--requests 32] [--compile]

Medians, and of the ratios of neighbouring runs, ours over theirs. Of B = 1, what a decode step reads (params and cache)
over its time, as a share of the bandwidth at which the same threads read memory, and the same of torch's products of
one row alone; with `--compile` also of a compiled step, whose products are loops of their own. `--cpu`:
the processor's time, on one thread, where others use the machine too.
"""

import logging
import random
import statistics
import tempfile
import time

import torch
import transformers
from harness import in_turn
from report import beside, options, ratios, show

from scaling import serve, tree
from scaling.configs import Config
from scaling.models import hf
from scaling.models import transformer as model
from scaling.serve import engine
from scaling.serve.fixed import Steps
from scaling.serve.requests import Request
from scaling.serve.states import Options

CONFIG = Config("llama", L=12, D=768, F=2048, N=12, K=4, H=64, V=32000, tied=True)
PROMPT, THREADS = 64, 2
WORDS = 1 << 26  # of the array that is read to find the bandwidth


def contest(net, params: dict, B: int, steps: int, clock) -> dict[str, dict[str, list[float]]]:
    """Seconds of each side's calls: prefill of B prompts and decode steps after it."""
    tokens = torch.randint(CONFIG.V, (B, PROMPT + steps), generator=torch.Generator().manual_seed(0))
    prompt, now = tokens[:, :PROMPT], {}
    ours, theirs = (iter(tokens[:, PROMPT:].unbind(1)) for _ in range(2))

    def our_prefill():
        cache = serve.init_cache(CONFIG, B, PROMPT + steps, dtype=torch.float32)
        now["ours"] = serve.prefill(params, prompt, cache, CONFIG, donate=True)

    def their_prefill():
        now["theirs"] = net(prompt, use_cache=True, logits_to_keep=1)

    def our_decode():
        now["ours"] = serve.decode(params, next(ours), now["ours"][1], CONFIG, donate=True)

    def their_decode():
        now["theirs"] = net(next(theirs)[:, None], past_key_values=now["theirs"].past_key_values, use_cache=True)

    prefills, decodes = {"ours": our_prefill, "theirs": their_prefill}, {"ours": our_decode, "theirs": their_decode}
    times = {"prefill": in_turn(prefills, 2 if B > 8 else 4, warmup=1, clock=clock)}
    times["decode"] = in_turn(decodes, steps - 1, warmup=1, clock=clock)
    logits, others = now["ours"][0], now["theirs"].logits[:, -1]
    gap = (logits - others).abs().max() / logits.abs().max()
    assert gap < 1e-3, f"the two sides compute different logits: {gap}"
    return times


def batched(net, params: dict, count: int, clock) -> dict[str, list[float]]:
    """Seconds of each run: so many requests that come at once, 32 tokens of each, by 8 slots and at most 64 tokens a
    step. No prefix is shared, on either side."""
    chance, new, page, slots, budget = random.Random(0), 32, 32, 8, 64
    prompts = [[chance.randrange(CONFIG.V) for _ in range(chance.randint(8, 128))] for _ in range(count)]
    pages = slots * (128 + new) // page
    arrivals = [(0.0, Request(i, tuple(prompt), new)) for i, prompt in enumerate(prompts)]
    how = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    their_options = transformers.ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=budget, max_requests_per_batch=slots,
        allow_block_sharing=False,
    )  # fmt: skip
    tokens = {}

    def ours():
        served = engine.serve(params, CONFIG, arrivals, Options(pages, page, slots, budget, prefix=False))
        tokens["ours"] = [list(served.requests[i].tokens) for i in range(count)]

    def theirs():
        answers = net.generate_batch(prompts, how, their_options, persistent_manager=True)
        numbers = sorted(answers, key=lambda id: int(id.removeprefix("req_")))
        tokens["theirs"] = [answers[id].generated_tokens for id in numbers]

    times = in_turn({"ours": ours, "theirs": theirs}, 3, warmup=1, clock=clock)
    differ = sum(a != b for a, b in zip(*tokens.values(), strict=True))
    assert differ <= count // 10, f"{differ} of {count} requests give other tokens"
    return times


def share_of_bandwidth(params: dict, steps: int, clock, compile: str | None = None) -> str:
    """What a decode step of one row reads, beside a sum of a large array and torch's products alone, in turn."""
    cache = serve.init_cache(CONFIG, 1, PROMPT + steps, dtype=torch.float32)
    _, cache = serve.prefill(params, torch.zeros(1, PROMPT, dtype=torch.int64), cache, CONFIG, donate=True)
    big, step, places = torch.ones(WORDS), Steps(params, CONFIG, cache, compile=compile), iter(range(PROMPT, 2**31))
    pairs = [(torch.ones(1, len(W)), W) for W in matrices(params)]

    def decoded():
        step([[0]], [next(places)])

    def multiplied():
        return [x @ W for x, W in pairs]

    sides = {"memory": big.sum, "decode": decoded, "products": multiplied}
    seconds = in_turn(sides, steps - 1, warmup=1, clock=clock)
    cache_bytes = 2 * CONFIG.L * PROMPT * CONFIG.K * CONFIG.H * 4
    read = {"memory": big.nbytes, "decode": tree.nbytes(params) + cache_bytes, "products": tree.nbytes(pairs)}
    rates = {name: [read[name] / each / 1e9 for each in times] for name, times in seconds.items()}
    share, most = (ratios(rates[name], rates["memory"])[1] for name in ("decode", "products"))
    decode, memory, products = (statistics.median(rates[name]) for name in ("decode", "memory", "products"))
    name = "compiled" if compile else "eager"
    return (
        f"B = 1, {name}, reads {decode:.1f} GB/s of the {memory:.1f} at which memory is read: {share:.0%}; torch's "
        f"products of one row with the same matrices, and nothing else, read {products:.1f}: {most:.0%}"
    )


def matrices(params: dict) -> list[torch.Tensor]:
    """Each layer's matrices [in, out] and the head's, as a decode step multiplies them."""
    stacks = {name: W for name, W in params["layers"].items() if name.startswith("W_")}
    found = [own.flatten(1) if name != "W_O" else own.flatten(0, 1) for name, W in stacks.items() for own in W]
    return [*found, params["embed"].T]


if __name__ == "__main__":
    parser = options(__doc__, steps=16, requests=32)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--compile", action="store_true", help="of the last line, also compiled steps")
    args, rows = parser.parse_args(), []
    clock, threads = (time.process_time, 1) if args.cpu else (time.perf_counter, THREADS)
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    params = model.init(CONFIG, 0)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, CONFIG, params)
        net = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {threads} threads, float32")
    print(f"{sum(leaf.numel() for leaf in tree.leaves(params)) / 1e6:.0f}M params, prompts of {PROMPT} tokens")
    with torch.no_grad():
        for B in args.batch:
            times = contest(net, params, B, args.steps, clock)
            rows += [[B, name, *beside(*both.values(), digits=2)] for name, both in times.items()]
        if args.requests:
            times = batched(net, params, args.requests, clock)
            rows.append([f"{args.requests} requests", "continuous", *beside(*times.values(), digits=0)])
        show(rows, ["B", "", "ours, ms", "theirs, ms", "ours / theirs"], 2)
        for backend in [None, "inductor"][: 1 + args.compile]:
            print(share_of_bandwidth(params, args.steps, clock, backend), flush=True)
