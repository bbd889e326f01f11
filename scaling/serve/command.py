"""`python -m scaling.serve --model MODEL --port 8000`: serve OpenAI's clients over HTTP, or a file.

With --port it answers /v1/completions and /v1/chat/completions until Ctrl-C, and shows a page to chat with at /. With
--input and --output each line of the input is a JSON object: "prompt" (text) or "ids", and optionally "id", "stop"
(texts), "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed" and "arrival" (seconds). Each line of the
output is one request's completion with its times. A line that cannot be served is named there, and the rest is served.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scaling import launch
from scaling.common.console import Parser, complain, complaining, integer, output
from scaling.common.lazy import needing
from scaling.common.torchrun import first_rank
from scaling.configs.sources import Source
from scaling.models.template import chat_template
from scaling.serve.cache import share_of
from scaling.serve.engine import serve
from scaling.serve.loading import Served, add_model, read_served
from scaling.serve.requests import RequestLine, Sampling, longest_text, read_requests, served_text
from scaling.serve.simulate import RequestTimes, Simulated
from scaling.serve.states import POLICIES, Options, Run
from scaling.serve.text import TextStream
from scaling.serve.types import cache_specs

CONTEXT = 2048  # tokens of the cache for each slot over HTTP, or as many as memory allows
FOR_EVER = 1e8  # seconds for which ranks may wait for a client


def arguments(argv=None) -> argparse.Namespace:
    """Read the command's arguments."""
    parser = Parser(prog="python -m scaling.serve", description=__doc__)
    add_model(parser)
    parser.add_argument(
        "--input", metavar="FILE", help="requests, one JSON object per line; - reads the standard input"
    )
    parser.add_argument("--output", metavar="FILE", type=output, help="completions, one line each")
    parser.add_argument("--port", type=integer(0, 65535), help="serve HTTP at this port; 0 is any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--key", help="what clients must send as their API key (default: none is needed)")
    key.add_argument(
        "--key-file", metavar="FILE", help="read the key from a file; without either, from the variable SCALING_KEY"
    )
    parser.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN",
        help="let pages of this origin, such as https://example.org or *, read answers; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--queue", type=integer(0), default=64, help="HTTP requests that may wait for a slot (default 64)"
    )
    parser.add_argument("--policy", default="chunked", choices=[*POLICIES], help="batching policy (default chunked)")
    parser.add_argument("--slots", type=integer(1), default=8, help="requests at once (default 8)")
    parser.add_argument(
        "--budget", type=integer(1), default=64, help="tokens per step of the chunked policy (default 64)"
    )
    parser.add_argument("--page", type=integer(1), default=16, help="tokens per page of the cache (default 16)")
    parser.add_argument(
        "--pages",
        type=integer(1),
        help="pages of the cache (default: for the longest requests, as far as memory allows)",
    )
    parser.add_argument("--no-prefix", action="store_true", help="do not share the pages of equal prefixes")
    parser.add_argument(
        "--max-new-tokens",
        type=integer(1),
        help="for requests that do not say (default 64; over HTTP 16, and in a chat all that fit)",
    )
    args = parser.parse_args(argv)
    if (args.port is None) != (bool(args.input) and bool(args.output)):
        parser.error("give --port, or both --input and --output")
    return args


def pages_of(lines: list[RequestLine], page: int, slots: int, most: int) -> tuple[int, list[RequestLine], list[dict]]:
    """Return (pages of a pool, at most `most`; the requests that it can serve; the errors of the others).

    There are pages for the longest requests that can be in the slots at once. If memory has fewer, some requests wait.
    """
    served, refused, needs = [], [], []
    for line in lines:
        length = len(line.request.prompt) + line.request.max_new_tokens
        if (need := -(-length // page)) <= most:
            served.append(line)
            needs.append(need)
        else:
            why = f"refused: {length} tokens with the completion, where memory has room for {most * page}"
            refused.append({"line": line.request.id, "id": line.name, "error": why})
    return max(1, min(sum(sorted(needs, reverse=True)[:slots]), most)), served, refused


def run(mesh, what: Served, lines: list[RequestLine], options: Options) -> Simulated:
    """Serve the lines, on every rank."""
    params, own = what.loaded(mesh)
    return serve(
        params, what.config, [(line.arrival, line.request) for line in lines], options,
        tokenizer=what.tokenizer, **own,
    )  # fmt: skip


def completion(line: RequestLine, times: RequestTimes, what: Served) -> dict:
    """Return a line of the output; times are seconds from the request's arrival."""
    if times.reason.startswith(("refused", "failed")):
        return {"line": line.request.id, "id": line.name, "error": times.reason}
    ids, text = list(times.tokens), TextStream(what.tokenizer, line.request.stops, line.request.prompt)
    told = "".join(text.push(id) for id in (ids[:-1] if ids and ids[-1] in what.ends else ids)) + text.rest()
    late = {"ttft": times.ttft, "tpot": times.tpot, "seconds": times.end - times.arrival}
    late = {name: None if math.isnan(value) else round(value, 6) for name, value in late.items()}
    return {
        "id": line.name, "text": told, "ids": ids, "reason": times.reason, "prompt_tokens": len(line.request.prompt),
        "cached_tokens": times.cached, "preempted": times.preempted, "arrival": line.arrival, **late,
    }  # fmt: skip


@complaining(ValueError, OSError, launch.RankError)
def main(argv=None) -> int:
    """Serve over HTTP, or serve a file of requests; return the exit status."""
    what = read_served(args := arguments(argv))
    cache_specs(what.config, what.mesh, form=what.form, page=args.page)
    groups = share_of(what.mesh, what.form).groups
    most = _most_pages(args, what, groups)
    slots = -(-args.slots // groups)  # in each group
    if args.port is not None:
        pages = args.pages or min(most, slots * -(-CONTEXT // args.page))
        return _over_http(args, what, _options(args, what, pages, groups))
    data = sys.stdin.buffer.read() if args.input == "-" else Path(args.input).read_bytes()
    most, how = args.max_new_tokens or 64, what.defaults.sampling
    lines, bad = read_requests(data, what.tokenizer, what.config.V, what.ends, most, how)
    if not lines and not bad:
        raise ValueError(f"{args.input}: holds no request\n  fix: give a file with a request in each line")
    pages, refused = args.pages, []
    if not pages:
        pages, lines, refused = pages_of(lines, args.page, slots, most)
    served: Any = Simulated((), {})
    if lines:
        served = what.on_ranks(run, lines, _options(args, what, pages, groups))
    if first_rank():
        return 0 if _report(args, what, lines, bad + refused, served) else 1
    return 0


def _most_pages(args, what: Served, groups: int) -> int:
    """Return the pages that memory has room for, per worker and group; ValueError if the options ask for more."""
    pools = 2 if args.policy == "disaggregated" else 1
    wide = _options(args, what, 1 << 62, groups)  # as if no pool were smaller than the windows
    tokens = wide.window_pages * args.page if wide.window else None
    cache = {"states": pools * (args.slots + 1), "window_tokens": tokens}
    most = what.length_that_fits(1, **cache) // (pools * args.page)
    if (least := args.pages or 1) > most:
        what.check_fits(1, pools * least * args.page, **cache)
    return most


def _options(args, what: Served, pages: int, groups: int) -> Options:
    proposals, longest = args.proposals if args.draft else 0, served_text(what.config)
    prefix = not args.no_prefix and not what.config.linear  # whose states after a prefix are not kept
    configs = [each.config for each in (what.model, what.draft) if isinstance(each, Source)]
    windows = [each for config in configs for each in config.windows if each] if args.policy == "chunked" else []
    options = Options(
        pages, args.page, args.slots, args.budget, args.policy, prefix, proposals, groups, longest,
        max(windows, default=None),
    )  # fmt: skip
    return options if options.window_pages < pages else replace(options, window=None)


def _over_http(args, what: Served, options: Options) -> int:
    """Serve HTTP until Ctrl-C."""
    with needing("--port", "serve"):
        from scaling.serve.web import app, server
        from scaling.serve.web.words import Model
    model = Model(
        what.config.name, what.tokenizer, what.config.V, what.ends, None, options, args.max_new_tokens,
        longest_text(what.config), what.defaults.sampling or Sampling(1.0),
    )  # fmt: skip
    args.key, args.cors = app.read_key(args.key, args.key_file), [*map(app.check_origin, args.cors)]
    listener = server.listen(args.host, args.port) if first_rank() else None
    with server.passed_on():
        what.on_ranks(_serve_http, args, model, listener, timeout=FOR_EVER)
    return 0


def _serve_http(mesh, what: Served, args, model, listener) -> None:
    """Serve HTTP, on every rank."""
    from scaling.serve.web import server

    if template := chat_template(what.model.folder):
        model = model._replace(chat=partial(template.render, add_generation_prompt=True))
    params, own = what.loaded(mesh)

    def ready(address: str, stop: Any) -> None:
        pages, page = model.options.pages * model.options.groups, model.options.page
        print(f"{model.name}: {address} ({args.mesh}, {pages:,} pages of {page} tokens); Ctrl-C ends it", flush=True)

    server.serve_http(
        params, model, what.config, listener, queue=args.queue, key=args.key, cors=args.cors, ready=ready, **own
    )


def _report(args, what: Served, lines: list[RequestLine], bad: list[dict], served: Simulated) -> int:
    """Write the completions, print the errors of the other lines, and return how many were served."""
    rows = {line.request.id: completion(line, served.requests[line.request.id], what) for line in lines}
    rows |= {row["line"]: row for row in bad}
    text = "".join(json.dumps(rows[n], ensure_ascii=False) + "\n" for n in sorted(rows))
    Path(args.output).write_text(text, encoding="utf-8")
    for row in rows.values():
        if "error" in row:
            complain(f"{args.input}: line {row['line']}: {row['error']}")
    good = sum("error" not in row for row in rows.values())
    text = f"{good} of {len(rows)} served"
    if good:
        ms = {name: 1e3 * served.percentile(name, 50) for name in ("ttft", "tpot")}
        text += f" in {served.seconds:.3f} s, {served.throughput:.4g} tokens/s; "
        text += f"median TTFT {ms['ttft']:.4g} ms, TPOT {ms['tpot']:.4g} ms"
        if args.draft:
            passes = sum(work.sample for step in served.steps if isinstance(step, Run) for work in step.works)
            text += f"; {sum(len(times.at) for times in served.requests.values()) / passes:.2f} tokens a pass"
    print(text)
    return good
