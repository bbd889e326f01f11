"""Find the model and the tokenizer that a run begins with, and keep both in the run's folder.

RUN/run.toml      the options; model = "model" and tokenizer = "model" mean the folder below
RUN/model/        the files that came with the model and its tokenizer: config.json, tokenizer.json, chat template, ...
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from scaling.common.arguments import of_type, read_table
from scaling.common.torchrun import first_rank
from scaling.configs import Config, get, source_of
from scaling.configs.hugging_face import router_weight
from scaling.configs.sources import COMPANIONS, CONFIGS, MODEL, RUN, TEMPLATES
from scaling.models.text import (
    BYTES,
    FILE,
    GENERATION,
    ID_KEYS,
    NAME,
    Tokenizer,
    Unknown,
    checked_tokenizer,
    copy_companions,
    tokenizer,
    tokenizer_of,
)
from scaling.train.corpus import INDEX, check_data, kind_and_files, shards_index
from scaling.train.documents import end_of_documents
from scaling.train.durable import complete_steps
from scaling.train.settings import Settings

PLACES = ("weights", "lora_from", "profile", "tensorboard")  # paths among the settings


def options_of(run: Path, **kinds: type) -> dict[str, Any]:
    """Return the options of the run in a folder, and check the types of those named in `kinds`.

    Raises:
        ValueError: The folder is not that of a run, or an option has another type.
    """
    if not (run / RUN).is_file():
        raise ValueError(
            f"{run}: is not a run of scaling.train: it has no {RUN}"
            "\n  fix: give the folder that a run of scaling.train wrote"
        )
    options = read_table(run / RUN)
    for name, kind in kinds.items():
        of_type(f"{run / RUN}: {name}", options.get(name), kind)
    return options


def config_and_weights(model: str, sizes_only: bool = False) -> tuple[Config, str]:
    """Return the config of a model, and the folder of the weights to begin with ("" if there are none).

    Raises:
        ValueError: `model` is the folder of a run, whose weights are checkpoints.
    """
    source = source_of(model, sizes_only=sizes_only)
    if source.is_run:
        raise ValueError(
            f"{model}: is a run\n  fix: go on with it by --out {model} --resume; or begin a new one with the folder "
            f"that python -m scaling.train export {model} --out FOLDER writes"
        )
    return source.config, source.folder


def with_losses_of_experts(config: Config, model: str, **given: float | None) -> Config:
    """Return the config with the weights `aux_coef` and `z_coef` of its experts' losses that were given.

    Raises:
        ValueError: The model has no experts; or none is given for the first, and the model's config.json asks for the
            loss of transformers, which is not computed for several layers with experts.
    """
    if wrong := [f"--{name.replace('_', '-')}" for name, weight in given.items() if weight and not config.moe]:
        raise ValueError(f"{wrong[0]}: {config.name} has no experts\n  fix: leave it out")
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    weight = router_weight(read_table(path)) if path.suffix == ".json" and path.is_file() else 0.0
    if weight and given["aux_coef"] is None and not config.aux_coef and config.moe:
        near = weight * config.k / (config.L - len(config.dense))
        raise ValueError(
            f"{path}: output_router_logits asks for {weight:g} times transformers' loss of all layers' routers together"
            "\n  rule: here each layer has a loss of its own, which has other gradients"
            f"\n  fix: give --aux-coef {near:.3g}, which is as much where the load is even, or --aux-coef 0"
        )
    return config.with_(**{name: weight for name, weight in given.items() if weight is not None})


def weights_to_begin_with(out: str, own: "str | None", given: str) -> str:
    """Return `own`, the folder of the weights that a run began with, or `given` if the run has not begun.

    Rank 0 warns if other weights were given, because the run does not use them.
    """
    others = Path(given).resolve() not in (Path(own or ".").resolve(), (Path(out) / MODEL).resolve())
    if own is not None and given and others and first_rank():
        print(f"warning: {out} goes on with its own weights, not with those of {given}", file=sys.stderr, flush=True)
    return given if own is None else own


def config_of_run(run: Path) -> Config:
    """Return the config of a run's model; ValueError if the options name a model that cannot be found."""
    options_of(run, model=str)
    return get(run)


def tokenizer_for(config: Config, model: str, weights: str, given: "str | None", data: str, out: "Path | None") -> str:
    """Return the tokenizer of a run as `Settings.tokenizer` holds it: "bytes", a file, a folder, or "" if unknown.

    The default is the tokenizer in the model's folder. For a model that begins without a folder, it is the one that
    made the shards of `data`, or else bytes. A resumed run uses its own tokenizer by default, and
    `record.check_unchanged` refuses another.

    Args:
        config: The model's config.
        model: The model's name or folder.
        weights: The folder of the weights to begin with, or "".
        given: The option --tokenizer.
        data: The option --data.
        out: The folder of the run that is resumed, if any.

    Raises:
        ValueError: The weights or the shards of `data` belong to another tokenizer, or no tokenizer can read the text.
    """
    places = [Path(path) for path, _ in weighted_paths(data)]
    if out is not None:
        if given and given != str(out / MODEL):
            by = checked_tokenizer(tokenizer(given), config.V, config.name)
        else:
            by = tokenizer_of(out, config.V)
        if weights and Path(model).resolve() != (out / MODEL).resolve():
            _given(config, model, weights, by.name if by.identity else None)
    elif given:
        by = _given(config, model, weights, given)
    elif Path(model).is_dir() and (weights or (Path(model) / FILE).is_file()):
        by = tokenizer_of(model, config.V)
    else:
        by = _of_data(config, places)
    for path in places:
        check_data(path, by)
    return by.name if by.identity else ""


def _given(config: Config, model: str, weights: str, given: "str | None") -> Tokenizer:
    """Return the tokenizer `given`, or an unknown one; ValueError if the weights have learned another's ids."""
    by = checked_tokenizer(tokenizer(given), config.V, config.name) if given else Unknown(model)
    own = tokenizer_of(model, config.V) if weights and Path(model).is_dir() else by
    if own.identity not in ("", by.identity):
        raise ValueError(
            f"--tokenizer {given}: the weights of {weights} have learned the ids of {own.name}"
            "\n  fix: leave --tokenizer out, or give --from-scratch"
        )
    return by


def _of_data(config: Config, places: list[Path]) -> Tokenizer:
    """Return the tokenizer of the data, for a model without one; rows of ids do not record which tokenizer it was."""
    for path in places:
        if (path / INDEX).is_file():
            made = path if (path / FILE).is_file() else "bytes"
            return checked_tokenizer(tokenizer(str(made)), config.V, config.name)
    kinds = {kind_and_files(path)[0] for path in places} if config.V != BYTES else {"text"}
    if kinds == {"ids", "text"}:
        raise ValueError(
            "--data: nothing says which tokenizer made the rows of ids, and so none can read the text beside them"
            "\n  fix: give --tokenizer with the one that made them"
        )
    return Unknown(config.name) if kinds == {"ids"} else tokenizer("bytes")


def tokenizer_in(settings: Settings) -> Tokenizer:
    """Return the tokenizer of a run's settings."""
    return tokenizer(settings.tokenizer) if settings.tokenizer else Unknown(settings.weights or settings.model.name)


def end_for(settings: Settings, args: argparse.Namespace) -> int:
    """Return the id that ends each document of a run, or `NO_END` if none does.

    Without --eos-id and --no-eos, it is the id that the shards end with, or else the tokenizer's end of text.

    Raises:
        ValueError: The id is outside the model's vocabulary.
    """
    places = [Path(path) for path, _ in weighted_paths(settings.data)]
    by, shards = tokenizer_in(settings), [path for path in places if (path / INDEX).is_file()]
    if shards and args.eos_id is None and not args.no_eos:
        return shards_index(shards[0], by)["eos"]
    found = end_of_documents(by, args, any(kind_and_files(path)[0] == "text" for path in places))
    if found >= settings.model.V:
        raise ValueError(
            f"--eos-id {found}: {settings.model.name} has the ids 0..{settings.model.V - 1}"
            "\n  fix: give one of these, or a model with a greater vocabulary"
        )
    return found


def keep_origin(out: Path, model: str, settings: Settings) -> dict[str, str]:
    """Copy the model's and the tokenizer's files into the run's folder, unless they are there already.

    The files of an earlier run that ended before its first checkpoint are removed, unless this run begins with them.
    Return the options of run.toml that name them and the run's other paths.
    """
    by, home = tokenizer_in(settings), out / MODEL
    path, place = Path(model), Path(settings.tokenizer)
    options = {"model": model, "tokenizer": settings.tokenizer, "identity": by.identity}
    before = options_of(out) if (out / RUN).is_file() else {}
    kept = MODEL in (before.get("model"), before.get("tokenizer"))
    if (
        kept
        and not complete_steps(out)
        and home.resolve() not in (path.resolve(), place.resolve(), place.resolve().parent)
    ):
        for name in (*CONFIGS, *COMPANIONS):
            (home / name).unlink(missing_ok=True)
        shutil.rmtree(home / TEMPLATES, ignore_errors=True)
    same = before.get("identity") == by.identity
    options[NAME] = before[NAME] if same and NAME in before else short_name(by)
    options |= {key: str(at and Path(at).resolve()) for key in PLACES if (at := getattr(settings, key)) is not None}
    options["chip"] = str(Path(settings.chip).resolve()) if Path(settings.chip).is_file() else settings.chip
    options["data"] = absolute_data(settings.data)
    if path.exists() and path.resolve() != home.resolve():
        home.mkdir(parents=True, exist_ok=True)
        file = next((path / name for name in CONFIGS if (path / name).is_file()), path)
        shutil.copyfile(file, home / f"config{file.suffix}")
        own = tokenizer(str(path)).identity if (path / FILE).is_file() else None
        belongs = path.is_dir() and (bool(settings.weights) if own is None else own == by.identity)
        if other := by.identity not in ("", "bytes", own):
            copy_companions(place, home)
        if belongs and other:  # the given tokenizer also brings the chat template, so the model's is not copied
            copy_companions(path, home, (GENERATION,))
        elif belongs:
            copy_companions(path, home)
        else:
            without_ends(home / f"config{file.suffix}")
    if path.exists():
        options["model"] = MODEL
    if by.identity not in ("", "bytes"):
        if place.resolve() not in (home.resolve(), (home / FILE).resolve()) and not (home / FILE).is_file():
            copy_companions(place, home)
        options["tokenizer"] = MODEL
    return options


def short_name(by: Tokenizer) -> str:
    """Return the tokenizer's file with its folder, usually a model's name; "bytes" for bytes, "" if unknown."""
    path = Path(by.name).absolute()
    return f"{path.parent.name}/{path.name}" if by.identity not in ("", "bytes") else by.identity


def without_ends(path: Path) -> None:
    """Remove the ids of begin and end, which belong to another tokenizer, from a Hugging Face config.json."""
    if path.suffix == ".json":
        table = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in table.items() if key not in ID_KEYS}, indent=2) + "\n")


def absolute_data(data: str) -> str:
    """Return --data with absolute paths, so that the run can go on from any working folder."""
    parts = weighted_paths(data)
    if parts == [(data, 1.0)]:
        return str(Path(data).resolve())
    return ",".join(f"{Path(path).resolve()}:{weight!r}" for path, weight in parts)


def weighted_paths(data: str) -> list[tuple[str, float]]:
    """Read "A:3,B" as [("A", 3.0), ("B", 1.0)], paths and their weights.

    Raises:
        ValueError: A weight is not a number above 0, or a path is empty, which would mean the working folder.
    """
    if Path(data).exists() or ("," not in data and ":" not in data):
        return [(data, 1.0)]
    found = []
    for part in data.split(","):
        path, colon, weight = part.rpartition(":")
        try:
            found.append((path if colon else part, float(weight) if colon else 1.0))
        except ValueError:
            raise ValueError(
                f"{data}: the weight {weight!r} is not a number\n  fix: write --data as PATH:WEIGHT,PATH:WEIGHT"
            ) from None
        if not found[-1][0]:
            raise ValueError(
                f"{data}: names no file between its commas\n  fix: write --data as PATH:WEIGHT,PATH:WEIGHT"
            )
        if not 0 < found[-1][1] < float("inf"):
            raise ValueError(
                f"{data}: the weight {weight} is not above 0\n  fix: give a positive number, or leave the file out"
            )
    return found
