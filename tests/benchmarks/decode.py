"""Prefill and decode beside Hugging Face's class, uncompiled, with its default attention, in turn on the same threads;
and requests of many lengths by continuous batching, beside its `generate_batch`.

    pip install transformers safetensors
    python tests/benchmarks/decode.py [--threads 2] [--steps 16] [--batch 1 8 64] [--requests 32]

Medians, and of the ratios of neighbouring runs, ours over theirs. Of B = 1, what a decode step reads (params and cache)
over its time, as a share of the bandwidth at which the same threads read memory. `--cpu`: the processor's time, on one
thread, where others use the machine too.
"""

import logging
import random
import statistics
import tempfile
import time

import torch
import transformers
from report import options, ratios, show, spread

from scaling import serve, tree
from scaling.models import hf
from scaling.serve import engine
from scaling.serve.requests import Request
from scaling.serve.states import Options

SIZES = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
SIZES |= {"num_hidden_layers": 12, "intermediate_size": 2048, "vocab_size": 32000, "tie_word_embeddings": True}
WORDS = 1 << 26  # of the array that is read to find the bandwidth


def contest(model, config, params, B: int, T: int, steps: int, clock) -> dict[str, list[float]]:
    """Seconds of each call, in turn: prefill of [B, T] and decode steps after it."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.V, (B, T + steps), generator=g)
    prompt, times = tokens[:, :T], {name: [] for name in ("prefill", "theirs prefill", "decode", "theirs decode")}

    def timed(name, call):
        start = clock()
        result = call()
        times[name].append(clock() - start)
        return result

    def our_prefill():
        cache = serve.init_cache(config, B, T + steps, dtype=torch.float32)
        return serve.prefill(params, prompt, cache, config, donate=True)

    def their_prefill():
        return model(prompt, use_cache=True, logits_to_keep=1)

    for _ in range(3 if B > 8 else 5):
        ours = timed("prefill", our_prefill)
        theirs = timed("theirs prefill", their_prefill)
    cache, past = ours[1], theirs.past_key_values
    for t in range(T, T + steps):
        ours = timed("decode", lambda t=t, cache=cache: serve.decode(params, tokens[:, t], cache, config, donate=True))
        cache = ours[1]
        theirs = timed("theirs decode", lambda t=t: model(tokens[:, t : t + 1], past_key_values=past, use_cache=True))
    gap = (ours[0] - theirs.logits[:, -1]).abs().max() / ours[0].abs().max()
    assert gap < 1e-3, f"the two sides compute different logits: {gap}"
    return {name: seconds[1:] for name, seconds in times.items()}


def batched(model, config, params, count: int, clock) -> dict[str, list[float]]:
    """Seconds of each run, in turn: so many requests that come at once, 32 tokens of each, by 8 slots and at most 64
    tokens a step. No prefix is shared, on either side."""
    chance, new, page, slots, budget = random.Random(0), 32, 32, 8, 64
    prompts = [[chance.randrange(config.V) for _ in range(chance.randint(8, 128))] for _ in range(count)]
    pages = slots * (128 + new) // page
    arrivals = [(0.0, Request(i, tuple(prompt), new)) for i, prompt in enumerate(prompts)]
    how = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    their_options = transformers.ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=budget, max_requests_per_batch=slots,
        allow_block_sharing=False,
    )  # fmt: skip

    def ours() -> list[list[int]]:
        served = engine.serve(params, config, arrivals, Options(pages, page, slots, budget, prefix=False))
        return [list(served.requests[i].tokens) for i in range(count)]

    def theirs() -> list[list[int]]:
        answers = model.generate_batch(prompts, how, their_options, persistent_manager=True)
        return [answers[id].generated_tokens for id in sorted(answers, key=lambda id: int(id.removeprefix("req_")))]

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(4):
        tokens = []
        for name, run in (("ours", ours), ("theirs", theirs)):
            start = clock()
            tokens.append(run())
            times[name].append(clock() - start)
        differ = sum(a != b for a, b in zip(*tokens, strict=True))
        assert differ <= count // 10, f"{differ} of {count} requests give other tokens"
    return {name: seconds[1:] for name, seconds in times.items()}


def share_of_bandwidth(config, params, T: int, steps: int, clock) -> tuple[float, float, float]:
    """(GB/s at which memory is read, GB/s of a decode step of one row, the median of their ratios), in turn."""
    cache = serve.init_cache(config, 1, T + steps, dtype=torch.float32)
    tokens = torch.zeros(1, T, dtype=torch.int64)
    _, cache = serve.prefill(params, tokens, cache, config, donate=True)
    big = torch.ones(WORDS)
    read = tree.nbytes(params) + 2 * config.L * T * config.K * config.H * 4
    rates = []
    for _ in range(steps):
        start = clock()
        big.sum()
        middle = clock()
        _, cache = serve.decode(params, tokens[:, 0], cache, config, donate=True)
        rates.append((4 * WORDS / (middle - start), read / (clock() - middle)))
    ratio = statistics.median(ours / memory for memory, ours in rates[1:])
    return *(statistics.median(rate) / 1e9 for rate in zip(*rates[1:], strict=True)), ratio


def main() -> None:
    parser = options(__doc__, threads=2, steps=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu else time.perf_counter
    args.threads = 1 if args.cpu else args.threads
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config, params = hf.load(folder)
    count = sum(leaf.numel() for leaf in tree.leaves(params))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {args.threads} threads, float32")
    print(f"{count / 1e6:.0f}M params, prompts of {args.prompt} tokens")
    rows = []
    with torch.no_grad():
        for B in args.batch:
            times = contest(model, config, params, B, args.prompt, args.steps, clock)
            for name in ("prefill", "decode"):
                ours, theirs = times[name], times[f"theirs {name}"]
                middle = [f"{1000 * statistics.median(side):.2f}" for side in (ours, theirs)]
                rows.append((B, name, *middle, spread(ratios(ours, theirs))))
        if args.requests:
            times = batched(model, config, params, args.requests, clock)
            middle = [f"{1000 * statistics.median(times[side]):.0f}" for side in ("ours", "theirs")]
            rows.append(
                (f"{args.requests} requests", "continuous", *middle, spread(ratios(times["ours"], times["theirs"])))
            )
        show(rows, ["B", "", "ours, ms", "theirs", "ratio"], 2)
        memory, ours, ratio = share_of_bandwidth(config, params, args.prompt, args.steps, clock)
    print(f"B = 1 reads {ours:.1f} GB/s of the {memory:.1f} at which memory is read: {ratio:.0%}")


if __name__ == "__main__":
    main()
