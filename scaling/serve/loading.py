"""What is served, a Hugging Face folder or a run of `scaling.train`; and whether it fits, before it is loaded."""

import tomllib
from pathlib import Path
from typing import Any

import torch

from scaling import tree
from scaling.configs import Config, get, load
from scaling.mesh import AbstractMesh
from scaling.models import hf
from scaling.models import transformer as model
from scaling.serve.cache import init_cache
from scaling.serve.generation import check_draft
from scaling.serve.types import check_mesh, specs
from scaling.train import checkpoint

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def config_of(folder: "str | Path") -> Config:
    """The model's sizes. ValueError for a folder that is neither a model nor a run."""
    folder = Path(folder)
    if (folder / "run.toml").is_file():
        named = tomllib.loads((folder / "run.toml").read_text())["model"]
        return load(Path(named) / "config.json") if Path(named).is_dir() else get(named)
    if (folder / "config.json").is_file():
        return load(folder / "config.json").with_(name=folder.name)
    raise ValueError(f"{folder}: neither a Hugging Face folder (config.json) nor a run of scaling.train (run.toml)")


def params_of(folder: "str | Path", config: Config, mesh, dtype: torch.dtype, form: str = "heads") -> dict:
    """This rank's params, typed as `serve.specs`; of the files only what they need is read."""
    folder, types = Path(folder), specs(config, mesh, form=form)
    if (folder / "run.toml").is_file():
        state, _ = checkpoint.load(folder, {"params": types}, mesh, among=True)
        return tree.map(lambda p: p.to(dtype), state["params"])
    return hf.load_sharded(folder, types, mesh, dtype)[1]


def draft_config(draft: str | None, config: Config, mesh, form: str = "heads") -> Config | None:
    """The sizes of the draft that --draft names, None of "ngram". ValueError for one that cannot serve `config`."""
    if draft in (None, "ngram"):
        return None
    small = config_of(draft)
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
    rows = -(-batch // mesh.size()) * mesh.size()
    length += -length % mesh.sizes.get("Z", 1)
    cache = init_cache(config, rows, length, mesh=mesh, dtype=dtype, form=form)
    return tree.nbytes(tree.shard(whole, specs(config, mesh, form=form), mesh)) + cache["KV"].nbytes


def available(device: str, ranks: int = 1) -> int:
    """Bytes that each rank may take: nine tenths of what the machine, or the GPU, has left."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] * 9 // 10
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib * 1024 * 9 // 10 // ranks


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
    models = [config] if draft is None else [config, draft]

    def total(length: int) -> int:
        return sum(needed(one, sizes, batch, length, dtype, form) for one in models)

    if (wanted := total(length)) <= memory:
        return
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= memory else (low, middle)
    fix = f"at most {low:,} tokens with the completion fit" if low else "a larger mesh, or fewer requests at once"
    raise ValueError(
        f"{config.name}: {batch} x {length:,} tokens take {wanted:,} bytes a rank, of {memory:,} that there are\n"
        f"  fix: {fix}"
    )
