"""What is served, a Hugging Face folder or a run of `scaling.train`; and whether it fits, before it is loaded."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from scaling import launch, tree
from scaling.configs import Config, with_weights
from scaling.configs.sources import RUN, WAYS
from scaling.console import Parser, integer
from scaling.mesh import AbstractMesh
from scaling.models import hf
from scaling.models import transformer as model
from scaling.serve.cache import init_cache
from scaling.serve.drafts import check_draft
from scaling.serve.types import FORMS, check_mesh, divisible, shards_of_places, specs
from scaling.train import checkpoint

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def add_model(parser: Parser) -> None:
    """The options of `generate` and `serve` that say what is served, and where."""
    parser.add_argument("--model", required=True, help=WAYS)
    parser.add_argument("--mesh", default="Y=1", help="mesh axes and their sizes; Y=4 splits heads (default Y=1)")
    parser.add_argument(
        "--form", default="heads", choices=FORMS, help="how a decode step is sharded over the mesh (default heads)"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the ranks (default cpu)")
    parser.add_argument("--dtype", default="fp32", choices=[*DTYPES], help="dtype of params and cache (default fp32)")
    parser.add_argument("--memory", type=integer(1, 1 << 62), help="bytes a rank may take (default: what is free)")
    parser.add_argument("--draft", metavar="MODEL", help='a smaller model that proposes tokens, or "ngram"')
    parser.add_argument("--proposals", type=integer(1, 64), default=4, help="tokens a draft proposes (default 4)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end of text")


def on_ranks(args: argparse.Namespace, *work: Any, **options: Any) -> Any:
    """What rank 0 returns of fn(mesh, ...); the ranks are torchrun's, or started here."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return launch.start(*work, device=args.device, **options)
    return launch.run(*work, device=args.device, **options)[0]


def with_folders(args: argparse.Namespace) -> tuple[Config, argparse.Namespace]:
    """(the model's sizes, the options with the folders of --model and --draft in the place of what names them).
    ValueError for what names no weights."""
    source, draft = with_weights(args.model), args.draft
    folder = draft if draft in (None, "ngram") else with_weights(draft).folder
    return source.config, argparse.Namespace(**vars(args) | {"model": source.folder, "draft": folder})


def params_of(folder: "str | Path", config: Config, mesh, dtype: torch.dtype, form: str = "heads") -> dict:
    """This rank's params, typed as `serve.specs`; of the files only what they need is read."""
    folder, types = Path(folder), specs(config, mesh, form=form)
    if (folder / RUN).is_file():
        state, _ = checkpoint.load(folder, {"params": types}, mesh, among=True)
        return tree.map(lambda p: p.to(dtype), state["params"])
    return hf.load_sharded(folder, types, mesh, dtype)[1]


def draft_config(draft: str | None, config: Config, mesh, form: str = "heads") -> Config | None:
    """The sizes of the draft that --draft names, None of "ngram". ValueError for one that cannot serve `config`."""
    if draft in (None, "ngram"):
        return None
    small = with_weights(draft).config
    check_draft(small, config)
    check_mesh(small, mesh, form)
    return small


def draft_of(draft: str | None, config: Config, mesh, dtype: torch.dtype, form: str = "heads") -> Any:
    """What `generate` and the engine take as `draft`: (config, params), "ngram" or None."""
    small = draft_config(draft, config, mesh, form)
    return draft if small is None or draft is None else (small, params_of(draft, small, mesh, dtype, form))


def needed(config: Config, sizes: dict[str, int], batch: int, length: int, dtype: torch.dtype, form: str) -> int:
    """Bytes that each rank holds: params, and a cache of `batch` rows of `length` tokens."""
    mesh = AbstractMesh(sizes)
    whole = model.init(config, 0, dtype, "meta")
    cache = init_cache(config, *divisible(batch, length, form, mesh), mesh=mesh, dtype=dtype, form=form)
    return tree.nbytes(tree.shard(whole, specs(config, mesh, form=form), mesh)) + cache["KV"].nbytes


def free_memory(device: str, ranks: int = 1) -> int:
    """Bytes that each rank may take: nine tenths of what the machine, or the GPU, has left."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] * 9 // 10
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib * 1024 * 9 // 10 // ranks


def length_that_fits(
    config: Config,
    sizes: dict[str, int],
    batch: int,
    dtype: torch.dtype,
    memory: int,
    form: str = "heads",
    draft: Config | None = None,
) -> int:
    """The greatest length of `batch` rows whose cache fits beside the params, a draft's too, into so many bytes a rank.

    0 or less where none does. A cache's bytes are proportional to its length.
    """
    unit = shards_of_places(form, AbstractMesh(sizes))
    models = [config] if draft is None else [config, draft]
    one, two = (sum(needed(each, sizes, batch, n * unit, dtype, form) for each in models) for n in (1, 2))
    return (memory - one) // (two - one) * unit + unit


def check_fits(
    config: Config,
    sizes: dict[str, int],
    batch: int,
    length: int,
    dtype: torch.dtype,
    memory: int,
    form: str = "heads",
    draft: Config | None = None,
) -> None:
    """ValueError unless params and cache, a draft's too, fit into so many bytes a rank; it says the greatest length
    that does."""
    most = length_that_fits(config, sizes, batch, dtype, memory, form, draft)
    if length <= most:
        return
    wanted = sum(needed(one, sizes, batch, length, dtype, form) for one in (config, draft) if one is not None)
    smaller = f"give at most {most:,} tokens, with the completion" if most > 0 else "serve fewer requests at once"
    raise ValueError(
        f"{config.name}: {batch} x {length:,} tokens take {wanted:,} bytes on each rank, and there are {memory:,}\n"
        f"  fix: {smaller}, or use a larger mesh"
    )
