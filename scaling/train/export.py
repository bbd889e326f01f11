"""`python -m scaling.train export RUN --out FOLDER`: writes a run's latest params as a Hugging Face folder.

With --mesh several ranks each read and write their shards, so that none holds the whole model. The tokenizer goes with
it: the run's tokenizer.json, or one whose tokens are the 256 bytes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from scaling import launch, tree
from scaling.arguments import of_type, read_table
from scaling.configs import Config, get, load
from scaling.console import Parser, complaining
from scaling.mesh import AbstractMesh
from scaling.models import hf
from scaling.sizes import parse_mesh
from scaling.spec import parse
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import slots_of
from scaling.train import checkpoint

RUN = "run.toml"  # a run's options, in its folder
TOKENIZER, BYTES = "tokenizer.json", 256


def options_of(run: Path, **kinds: type) -> dict[str, Any]:
    """The options of the run in a folder, of which those named are of these types. ValueError if it has none."""
    if not (run / RUN).is_file():
        raise ValueError(
            f"{run}: is not a run of scaling.train: it has no {RUN}"
            "\n  fix: give the folder that a run of scaling.train wrote"
        )
    options = read_table(run / RUN)
    for name, kind in kinds.items():
        of_type(f"{run / RUN}: {name}", options.get(name), kind)
    return options


def config_at(place: str) -> tuple[Config, str]:
    """The sizes of a model by name, of a config.json or of an HF folder, which may have weights: (config, folder)."""
    path = Path(place)
    if path.is_dir():
        return load(path / "config.json"), str(path)
    return load(path) if path.suffix == ".json" else get(place), ""


def export(mesh, run: Path, step: int, config: Config, out: Path) -> None:
    """Write the params of a checkpoint, read as shards of this mesh."""
    types, slots = transformer.specs(config, mesh), slots_of(config, mesh, None)
    named = {f'state["params"]{where.removeprefix("params")}': spec for where, spec in tree.named_leaves(types).items()}
    leaves = [checkpoint.leaf(run, step, where, mesh, parse(spec), {"L": slots}) for where, spec in named.items()]
    params = tree.unflatten(types, leaves)
    hf.save_sharded(out, config, params, types, mesh, single=mesh.size() == 1, slots=slots)


def add_tokenizer(out: Path, name: str, vocabulary: int) -> None:
    """Write the tokenizer of a run that was given `--tokenizer NAME`. FileNotFoundError if its file is gone."""
    if name != "bytes":
        path = Path(name)
        shutil.copy(path / TOKENIZER if path.is_dir() else path, out / TOKENIZER)
    elif vocabulary == BYTES:  # with more tokens, ids may be another tokenizer's
        (out / TOKENIZER).write_text(json.dumps(of_bytes()))
        (out / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


def of_bytes() -> dict:
    """The tokenizer.json in which byte b is token b.

    Its names of bytes are those of Hugging Face's ByteLevel: a printable byte's own character, for others those from
    256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, BYTES)]
    rest = [b for b in range(BYTES) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(BYTES + i): b for i, b in enumerate(rest)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


@complaining(ValueError, OSError, launch.RankError)
def main(argv=None) -> int:
    parser = Parser(prog="python -m scaling.train export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
    parser.add_argument("--mesh", default="X=1", help="mesh of the ranks that share the work (default X=1)")
    args = parser.parse_args(argv)
    options = options_of(args.run, model=str, tokenizer=str)
    config, _ = config_at(options["model"])
    step = checkpoint.latest(args.run) if args.step is None else args.step
    sizes = parse_mesh(args.mesh)
    for spec in map(parse, tree.leaves(transformer.specs(config, AbstractMesh(sizes)))):
        if "L" not in spec.dim_names:  # layers that do not divide are padded
            spec.local_shape(config.sizes, sizes)
    launch.run(export, sizes, args.run, step, config, args.out)
    add_tokenizer(args.out, options["tokenizer"], config.V)
    print(f"step {step}: {args.out}")
    return 0
