"""`python -m scaling.generate --model MODEL --prompt TEXT --max-new-tokens 64`: generate text from a model.

MODEL is a Hugging Face folder, org/name on the hub, FILE.gguf, or the --out of `scaling.train`. The text is written as
it comes, whole characters only. With --mesh Y=4 the ranks of the mesh are started here, or are torchrun's.
"""

import argparse
import math
import sys
from dataclasses import replace
from typing import Any

from scaling import launch
from scaling.common.console import SEEDS, Parser, complaining, integer, number
from scaling.models.template import chat_template
from scaling.serve.generation import Token, score, stream
from scaling.serve.loading import Served, add_model, read_served
from scaling.serve.requests import SAMPLING, SURROGATE, Sampling
from scaling.serve.text import TextStream


def arguments(argv=None) -> argparse.Namespace:
    """Read the options."""
    parser = Parser(prog="python -m scaling.generate", description=__doc__)
    add_model(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="the text to go on from; - reads it from the standard input")
    what.add_argument("--prompt-ids", metavar="IDS", help="the same as token ids, 5,17,3: ids are printed then")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message, in the chat template")
    parser.add_argument(
        "--max-new-tokens", type=integer(0), default=64, help="the most tokens to generate (default 64)"
    )
    parser.add_argument(
        "--temperature",
        type=number(0, 1e6),
        help="sampling temperature; 0 is greedy (default: what the model's generation_config.json asks for, or 0)",
    )
    parser.add_argument("--top-k", type=integer(1), help="sample from the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=number(1e-9, 1), help="sample from the likeliest tokens whose probabilities sum to p"
    )
    parser.add_argument(
        "--min-p", type=number(0, 1), help="sample from tokens at least p times as likely as the likeliest"
    )
    parser.add_argument("--seed", type=integer(0, SEEDS), default=0, help="seed of the sampling (default 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be given several times"
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="afterwards print each new token's log-probability, in nats"
    )
    parser.add_argument(
        "--score", action="store_true", help="generate nothing: print the log-probabilities of the prompt's tokens"
    )
    return parser.parse_args(argv)


def run(mesh, what: Served, args, prompt: list[int], how: Sampling) -> None:
    """Generate from the prompt, or score it, on every rank; rank 0 prints."""
    params, own = what.loaded(mesh)
    first, tokenizer, ends = mesh.rank == 0, what.tokenizer, what.ends
    if args.score:
        logprobs = score(params, [prompt], what.config, mesh=own["mesh"], dtype=own["dtype"], form=what.form)[0]
        if first:
            scored = [Token(0, id, p) for id, p in zip(prompt[1:], logprobs, strict=True)]
            print("\n".join([*_table(scored, tokenizer), _summary(logprobs)]))
        return
    text, tokens = TextStream(tokenizer, args.stop), []
    for step in stream(
        params, [prompt], what.config, args.max_new_tokens, how,
        seed=args.seed, stop=ends, proposals=args.proposals, **own,
    ):  # fmt: skip
        for token in step:
            if text.stopped:
                break
            tokens.append(token)
            new = f"{token.id} " if args.prompt_ids is not None else "" if token.id in ends else text.push(token.id)
            if first:
                print(new, end="", flush=True)
        if text.stopped:
            break
    if first:
        print(text.rest() if args.prompt_ids is None else "")
        if args.logprobs:
            print("\n".join([*_table(tokens, tokenizer), _summary([token.logprob for token in tokens])]))


def _table(tokens: list[Token], tokenizer) -> list[str]:
    return [f"{token.logprob:10.4f}  {token.id:>7}  {tokenizer.decode([token.id])!r}" for token in tokens]


def _summary(logprobs: list[float]) -> str:
    """Return the line with the sum of the log-probabilities, the number of tokens and the perplexity."""
    if not logprobs:
        return "no token to score"
    mean = sum(logprobs) / len(logprobs)
    return f"{sum(logprobs):10.4f}  over {len(logprobs)} tokens; perplexity {math.exp(-mean):.4g}"


def prompt_of(args, what: Served) -> list[int]:
    """Return the ids of the prompt, in the chat template with --chat; ValueError if there are none."""
    if args.prompt_ids is not None:
        try:
            return [int(part) for part in args.prompt_ids.split(",")]
        except ValueError:
            raise ValueError(
                f"--prompt-ids {args.prompt_ids!r}: whole numbers, 5,17,3\n  fix: write them with commas between"
            ) from None
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if SURROGATE.search(text):  # how Python reads bytes that are not UTF-8
        raise ValueError("the prompt is not UTF-8\n  fix: convert it, as by iconv -t utf-8")
    if args.chat:
        if (template := chat_template(what.model.folder)) is None:
            raise ValueError(f"{what.model.folder}: has no chat template\n  fix: give the prompt without --chat")
        text = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    ids = what.tokenizer.encode(text, special=not args.chat)
    if not ids:
        raise ValueError("the prompt is empty\n  fix: give at least one token")
    return ids


def sampling_of(args, what: Served) -> Sampling:
    """Return the sampling options; an option that is not given has the model's default."""
    options = {name: getattr(args, name) for name in SAMPLING}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return replace(what.defaults.sampling or Sampling(), **given)


@complaining(ValueError, OSError, launch.RankError)
def main(argv=None) -> int:
    """Run the command; return the exit code."""
    what = read_served(args := arguments(argv))
    how, prompt = sampling_of(args, what), prompt_of(args, what)
    what.check_fits(1, len(prompt) + (0 if args.score else args.max_new_tokens))
    what.on_ranks(run, args, prompt, how)
    return 0
