"""The served model, a Hugging Face folder or a run of `scaling.train`: its defaults, and whether it fits."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scaling import launch, tree
from scaling.common.arguments import table_if_any
from scaling.common.console import Parser, complain, integer
from scaling.common.torchrun import first_rank, world_size
from scaling.configs import Config, with_weights
from scaling.configs.sources import WAYS, Source
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer
from scaling.models.template import ends_of
from scaling.models.text import GENERATION, home_of, tokenizer_of
from scaling.serve.cache import divisible, init_cache, share_of
from scaling.serve.draft import check_draft
from scaling.serve.fixed import why_eager, why_not
from scaling.serve.requests import SAMPLING, Sampling
from scaling.serve.types import FORMS, check_mesh, plain_leaf, quantize, quantizers, specs
from scaling.spec import FORMATS
from scaling.spec.sizes import parse_mesh
from scaling.train.export import params_of_run

UNSERVED = {  # settings that would change tokens and are not computed here, with the value that changes nothing
    "repetition_penalty": 1, "no_repeat_ngram_size": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "num_beams": 1, "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1, "penalty_alpha": 0, "top_h": None,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "watermarking_config": None,
}  # fmt: skip


class ModelDefaults(NamedTuple):
    """The sampling that a model asks for.

    Attributes:
        sampling: How its tokens are drawn; None if it does not ask to sample.
        unserved: Settings that it asks for and that are not computed here.
    """

    sampling: Sampling | None = None
    unserved: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the line that commands print; "" if there is nothing to say."""
        names = SAMPLING if self.sampling else ()
        drawn = [f"{name} {value:g}" for name in names if (value := getattr(self.sampling, name)) is not None]
        parts = ["sampling by " + ", ".join(drawn)] if drawn else []
        parts += ["not computed here: " + ", ".join(self.unserved)] if self.unserved else []
        return f"{GENERATION}: {'; '.join(parts)}" if parts else ""


NO_DEFAULTS = ModelDefaults()


def defaults_of(folder: "str | Path") -> ModelDefaults:
    """Return the defaults in the generation_config.json of a model's folder, or of a run's.

    As in transformers, its temperature and filters count if it says `do_sample`; otherwise it is greedy. Only
    the file's own keys count: transformers would add a top_k of 50.

    Raises:
        ValueError: No token can be drawn with a value.
    """
    table = table_if_any(path := home_of(folder) / GENERATION)
    unserved = [f"{key} {table[key]!r:.40}" for key, none in UNSERVED.items() if table.get(key) not in (None, none)]
    return ModelDefaults(_sampling(path, table) if table.get("do_sample") is True else None, tuple(unserved))


def _sampling(path: Path, table: dict[str, Any]) -> Sampling:
    given: dict[str, Any] = {name: table[name] for name in SAMPLING if table.get(name) is not None}
    if given.get("top_k") in (0, -1):  # no filter, in transformers and in vLLM
        del given["top_k"]
    try:
        return Sampling(**{"temperature": 1.0, **given})
    except ValueError as error:
        what = str(error).partition("\n")[0]
        raise ValueError(f"{path}: {what}\n  fix: mend the file, or give --no-generation-config") from None


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
CACHES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # dtypes of 8 bits, which have scales
WEIGHTS = [name for name, each in FORMATS.items() if not each.whole and not name.endswith("e5m2")]


def add_model(parser: Parser) -> None:
    """Add the options of `generate` and `serve` that say which model is served, and where."""
    parser.add_argument("--model", required=True, help=WAYS)
    parser.add_argument("--mesh", default="Y=1", help="mesh axes and their sizes; Y=4 splits heads (default Y=1)")
    parser.add_argument(
        "--form", default="heads", choices=FORMS, help="how a decode step is sharded over the mesh (default heads)"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the ranks (default cpu)")
    parser.add_argument("--dtype", default="fp32", choices=[*DTYPES], help="dtype of params and cache (default fp32)")
    formats = f"store matrices in this format, with scales: {', '.join(WEIGHTS)}"
    parser.add_argument("--weights", choices=WEIGHTS, metavar="FORMAT", help=formats)
    parser.add_argument("--cache", choices=[*CACHES], help="store keys and values in 8 bits, with scales")
    parser.add_argument("--memory", type=integer(1, 1 << 62), help="bytes a rank may take (default: what is free)")
    parser.add_argument("--draft", metavar="MODEL", help='a smaller model that proposes tokens, or "ngram"')
    parser.add_argument("--proposals", type=integer(1, 64), default=4, help="tokens a draft proposes (default 4)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end of text")
    parser.add_argument(
        "--no-generation-config", action="store_true",
        help="draw tokens as the options or the request say, whatever the model's generation_config.json asks for",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile decode steps by torch.compile (inductor)")
    parser.add_argument("--no-capture", action="store_true", help="do not capture decode steps as CUDA graphs on a GPU")


@dataclass(frozen=True)
class Served:
    """The served model: a model on a mesh, in a form of decoding, and perhaps a draft.

    `draft` is another model or "ngram". `memory`: bytes that each rank may take. `ends`: the ids that end a text.
    `defaults`: the model's sampling, for requests that do not say how their tokens are drawn. `compile`, `capture`:
    whether to compile, or to capture, decode steps. `weights`: the format of the model's matrices; `cache`: the dtype
    of caches. Without them, they are in `dtype`.
    """

    model: Source
    sizes: dict[str, int]
    dtype: torch.dtype = torch.float32
    form: str = "heads"
    memory: int = 1 << 62
    device: str = "cpu"
    draft: "Source | str | None" = None
    tokenizer: Any = None
    ends: tuple[int, ...] = ()
    defaults: ModelDefaults = NO_DEFAULTS
    compile: bool = False
    capture: bool = True
    weights: str | None = None
    cache: torch.dtype | None = None

    @property
    def config(self) -> Config:
        """The model's config."""
        return self.model.config

    @property
    def mesh(self) -> AbstractMesh:
        """An abstract mesh of the sizes."""
        return AbstractMesh(self.sizes)

    def needed(self, batch: int, length: int, states: int = 1, window_tokens: int | None = None) -> int:
        """Return bytes of params and of a cache of `batch` rows of `length` tokens on each rank, a draft's included.

        `states` is the number of states of linear layers for each row: one, or in an engine's pool of pages, which is
        one row, the number of slots. If layers with a window have a separate pool, it has room for `window_tokens`.
        """
        found = 0
        for source in (self.model, self.draft):
            if isinstance(source, Source):
                config, (rows, places) = source.config, divisible(batch, length, self.form, self.mesh)
                dtype, given = self.cache or self.dtype, {"mesh": self.mesh, "form": self.form}
                cache = init_cache(config, rows, places, dtype=dtype, **given)
                params = tree.shard(transformer.init(config, 0, self.dtype, "meta"), specs(config, **given), self.mesh)
                if self.weights and source is self.model:
                    params = quantize(params, config, self.weights, **given)
                shorter = sum(window is not None for window in config.windows) if window_tokens is not None else 0
                tokens = shorter * min(places, window_tokens or 0) + (config.L - shorter) * places
                kept = Fraction(tokens, config.L * places)
                times = {"KV": kept, "scale": kept, "S": states, "tail": states}
                found += tree.nbytes(params)
                found += int(sum(cache[name].nbytes * times[name] for name in times if name in cache))
        return found

    def length_that_fits(self, batch: int, window_tokens: int | None = None, **cache) -> int:
        """Return the greatest length of `batch` rows whose caches fit with the params; 0 or less if none fits.

        A cache's bytes are linear in its length, with a smaller slope beyond `window_tokens`.
        """
        unit, found = share_of(self.mesh, self.form).shards, []
        for start in (1, 1 + (window_tokens or 0) // unit):
            one, two = (self.needed(batch, n * unit, window_tokens=window_tokens, **cache) for n in (start, start + 1))
            found.append(((self.memory - one) // max(1, two - one) + start) * unit)
        return max(found)

    def check_fits(self, batch: int, length: int, **cache) -> None:
        """Check that params and caches fit; the ValueError gives the greatest length that does."""
        most = self.length_that_fits(batch, **cache)
        if length <= most:
            return
        smaller = f"give at most {most:,} tokens, with the completion" if most > 0 else "serve fewer requests at once"
        raise ValueError(
            f"{self.config.name}: {batch} x {length:,} tokens take {self.needed(batch, length, **cache):,} bytes on "
            f"each rank, and there are {self.memory:,}\n  fix: {smaller}, or use a larger mesh"
        )

    def on_ranks(self, fn: Callable, *given: Any, **options: Any) -> Any:
        """Return rank 0's result of fn(mesh, this, *given); the ranks are torchrun's, or started here."""
        work = fn, self.sizes, self, *given
        if world_size() > 1:
            return launch.start(*work, device=self.device, **options)
        return launch.run(*work, device=self.device, **options)[0]

    def loaded(self, mesh) -> tuple[dict, dict[str, Any]]:
        """Return (this rank's params, the options of `generate` and the engine); only this rank's part is read."""
        draft = (self.draft.config, self._params(self.draft, mesh)) if isinstance(self.draft, Source) else self.draft
        own = {"mesh": mesh if mesh.size() > 1 else None, "form": self.form, "draft": draft, "capture": self.capture}
        own |= {"dtype": self.cache}
        params = self._params(self.model, mesh, self.weights)
        asked = {"compiled": self.compile and why_eager(self.config)}
        asked["captured"] = (
            self.capture and self.device == "cuda" and why_not(self.config, mesh, plain_leaf(params).device)
        )
        for what, why in asked.items():
            if why and mesh.rank == 0:
                complain(f"decode steps are not {what}: {why}")
        return params, own | {"compile": "inductor" if self.compile else None}

    def _params(self, source: Source, mesh, format: str | None = None) -> dict:
        types = specs(source.config, mesh, form=self.form)
        stored = quantizers(source.config, format, mesh, self.form) if format else None
        if not source.is_run:
            return hf.load_sharded(source.folder, types, mesh, self.dtype, stored=stored)[1]
        params = tree.map(lambda p: p.to(self.dtype), params_of_run(Path(source.folder), source.config, types, mesh))
        return tree.map(lambda store, p: store(p), stored, params) if stored else params


def read_served(args: argparse.Namespace) -> Served:
    """Return the model that the options name; ValueError and ShardingError if it cannot be served."""
    sizes, model, draft = parse_mesh(args.mesh), with_weights(args.model), args.draft
    mesh = AbstractMesh(sizes)
    check_mesh(model.config, mesh, args.form)
    if draft not in (None, "ngram"):
        draft = with_weights(draft)
        check_draft(draft.config, model.config)
        check_mesh(draft.config, mesh, args.form)
    memory = args.memory or int(min(0.9 * launch.free_memory(args.device, mesh.size()), 1 << 62))
    tokenizer = tokenizer_of(model.folder, model.config.V)
    ends = () if args.ignore_eos else ends_of(model.folder, tokenizer)
    defaults = NO_DEFAULTS if args.no_generation_config else defaults_of(model.folder)
    if (note := str(defaults)) and first_rank():
        complain(note)
    return Served(
        model, sizes, DTYPES[args.dtype], args.form, memory, args.device, draft, tokenizer, ends, defaults,
        args.compile, not args.no_capture, args.weights, CACHES.get(args.cache),
    )  # fmt: skip
