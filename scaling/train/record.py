"""Record the options, model, tokenizer and data that a checkpoint was made with, and compare them on resumption.

The index of each step holds this record. A resumed run makes its own record and compares the two before it writes
anything into its folder.

Data are identified by the size and a digest of each file in the order of reading. A file of at most 8 MiB is hashed
whole. In a larger file only 64 blocks of 64 KiB are hashed, spread evenly from its first byte to its last, so that a
large corpus takes seconds. A change outside these blocks that keeps the size is not detected. The paths of the files do
not matter, except for their suffixes, as long as the order is the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from scaling.common.torchrun import this_rank
from scaling.configs import Config
from scaling.configs.sources import RUN
from scaling.models.template import chat_template, chosen_end
from scaling.models.text import Tokenizer
from scaling.train import checkpoint
from scaling.train.batches import DRAWN, ORDER
from scaling.train.corpus import check_data, shards_index
from scaling.train.durable import newest_first, step_name
from scaling.train.origin import config_of_run, options_of, tokenizer_in, weighted_paths
from scaling.train.settings import Settings, rate

WHOLE, BLOCK, BLOCKS = 1 << 23, 1 << 16, 64  # bytes hashed whole; bytes and number of the blocks of a larger file
LISTED = 1000  # files of a source that are listed one by one; the rest share one digest
SHOWN = 4  # differing files that an error names
# The options that a run keeps to its end:
FIXED = ("dtype", "eos_id", "lora", "lora_alpha", "lora_on", "no_bos", "no_template", "optimizer", "seed", "seq")
FIXED += ("valid",)
# The options that may change at any step:
FREE = ("batch", "betas", "clip", "decay_steps", "label_smoothing", "lr", "min_lr", "schedule", "steps", "warmup")
FREE += ("weight_decay", "z_loss")
OF_MODEL = ("aux_coef", "dropout", "z_coef")  # fields of the model's config that may change at any step
# The options that earlier versions did not record, because they could not be chosen:
EARLIER = {"betas": "0.9,0.95", "label_smoothing": 0.0, "min_lr": None, "valid": 0.05, "z_loss": 0.0}
KEPT = ("base model", "chat template", "tokenizer")  # other entries of the record that a run keeps to its end
SCHEDULE = ("decay_steps", "lr", "min_lr", "schedule", "warmup")  # the options that, with steps, give the learning rate


def record_of(settings: Settings) -> dict[str, Any]:
    """Return the record that a run with these settings stores in its checkpoints, as JSON would return it."""
    by, options = tokenizer_in(settings), {name: getattr(settings, name) for name in (*FIXED, *FREE)}
    options |= {name: getattr(settings.model, name) for name in OF_MODEL}
    options |= {"eos_id": chosen_end(by, settings.eos_id)}
    found = {"options": options, "model": _sizes(settings.model), "tokenizer": by.identity, "order": ORDER}
    found["data"] = fingerprint(weighted_paths(settings.data), by)
    if settings.adapters and settings.weights:
        found["base model"] = weights_digest(Path(settings.weights))
    if any(Path(name).suffix == ".jsonl" for source in found["data"] for name, *_ in source["files"]):
        template = None if settings.no_template or not by.folder else chat_template(by.folder)
        templates = template and json.dumps([dict(template.templates), template.tokens], sort_keys=True)
        found["chat template"] = templates and blake2b(templates.encode(), digest_size=16).hexdigest()
    return json.loads(json.dumps(found))


def weights_digest(folder: Path) -> list[str]:
    """Return a digest of each safetensors file in a folder, to identify the weights to which adapters belong."""
    return [digest_of(path) for path in sorted(folder.glob("*.safetensors"))]


def read_record(out: Path, step: int | None) -> dict[str, Any]:
    """Return the record of a step; if `step` is None, that of the model and tokenizer in the run's folder.

    Raises:
        ValueError: The step has no record, or that of another command.
    """
    if step is not None:
        if "options" not in (found := checkpoint.index(out, step).get("made_with", {})):
            what = f"{out / step_name(step)}: does not say with which options of scaling.train it was made"
            raise ValueError(f"{what}\n  fix: begin another run with another --out")
        return found
    if not (out / RUN).is_file():
        return {}
    found = {"model": _sizes(config_of_run(out)), "tokenizer": options_of(out, identity=str)["identity"]}
    return json.loads(json.dumps(found))


def resumable_steps(settings: Settings) -> list[int]:
    """Return the steps from which a run may go on, in the order in which it tries them; [] for a new run."""
    if settings.resume and settings.step and not this_rank().restarts:  # torchrun's restarts go on from the latest
        return [settings.step]
    return newest_first(Path(settings.out)) if settings.resume else []


def first_readable_record(out: Path, steps: Sequence[int]) -> tuple[int | None, dict[str, Any]]:
    """Return the first of these steps whose record can be read, and its record.

    Without steps, return None and the record of the model and tokenizer in the folder. If no step's record can be read,
    the error of the first step is raised.
    """
    errors = []
    for step in steps:
        try:
            return step, read_record(out, step)
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return None, read_record(out, None)


def _sizes(config: Config) -> dict[str, Any]:
    """Return the fields of a config that identify a model: all that are compared, except names and OF_MODEL."""
    compared = [field.name for field in fields(config) if field.compare]
    return {name: asdict(config)[name] for name in compared if name not in ("name", "source", *OF_MODEL)}


def check_options_kept(out: Path, before: Mapping[str, Any]) -> None:
    """Check that run.toml has all options that the checkpoint was made with.

    Raises:
        ValueError: run.toml is missing or cut short.
    """
    there = (out / RUN).is_file() and (out / RUN).read_bytes().endswith(b"\n")
    if not there or any(name not in options_of(out) for name, value in before["options"].items() if value is not None):
        raise ValueError(
            f"{out / RUN}: is missing or cut short: it does not say with which options the checkpoints were made\n"
            "  fix: put it back, or begin another run with another --out"
        )


def check_unchanged(settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a resumed run agrees with the record of its checkpoint.

    Only entries that both records have are compared. With --new-data the data may differ.

    Raises:
        ValueError: The run differs; the message names every difference.
    """
    found = [f"{_flag(name)} {then}, not {given}" for name, then, given in _changed(before, now, FIXED)]
    if sizes := _differing(before.get("model", {}), now["model"]):
        listed = ", ".join(f"{name} {then}, not {given}" for name, then, given in sizes)
        found.append(f"another model than {settings.model.name}: {listed}")
    found += [f"another {what}" for what, *_ in _differing(before, now) if what in KEPT]
    new = "" if settings.new_data else changed_data(settings, before, now)
    found += [f"other data: {new}"] if new else []
    if found:
        fix = "give the same, or another --out" + (", or --new-data if these data are meant" if new else "")
        raise ValueError(f"{settings.out}: was begun with {'; with '.join(found)}\n  fix: {fix}")


def changed_data(settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how the data differ from the data that a checkpoint was made with; return "" if they do not."""
    if "data" not in before:
        return ""
    return differing_data(before["data"], now["data"], [path for path, _ in weighted_paths(settings.data)])


def begins_new_data(settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a resumed run begins a new epoch of other data, as it does with --new-data if the data differ."""
    return settings.new_data and bool(changed_data(settings, before, now))


def order_of(settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, bool]:
    """Return how the order of the data is made, and whether documents are packed whole where some tokens do not count.

    A run keeps both until it begins other data. `before` is {} in a new run. The records of earlier versions name
    neither: the order was always drawn, and documents were cut.
    """
    kept = before and not begins_new_data(settings, before, now)
    return (before.get("order", DRAWN), before.get("packed", False)) if kept else (ORDER, True)


def option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the options in FREE and OF_MODEL that have changed since a checkpoint; return "" if none has."""
    found = _changed(before, now, (*FREE, *OF_MODEL))
    return ", ".join(
        f"{_flag(name)} {given}, not {'its default' if then is None else then}" for name, then, given in found
    )


def rate_change(settings: Settings, before: Mapping[str, Any], step: int) -> str:
    """Describe how a changed --steps, which stretches the learning rate's decay, changes the rate after a step.

    Return "" if it does not, or if other options of the schedule have changed.
    """
    there = EARLIER | before["options"]
    if any(there[name] != getattr(settings, name) for name in SCHEDULE):
        return ""
    asked = replace(settings, steps=there["steps"])
    was, becomes = (rate(each)(torch.tensor(step)).item() for each in (asked, settings))
    change = f"the learning rate of step {step + 1} is {becomes:.3g}, where it was to be {was:.3g}"
    return "" if was == becomes else f"{change}: --decay-steps {asked.steps} lets it fall as before"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _changed(before: Mapping, now: Mapping, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    there = EARLIER | before["options"] if "options" in before else {}
    return _differing({name: there[name] for name in names if name in there}, now["options"])


def _differing(before: Mapping, now: Mapping) -> list[tuple[str, Any, Any]]:
    """Return [(name, value before, value now)] for each name that both have with different values."""
    return [(name, then, now[name]) for name, then in before.items() if name in now and now[name] != then]


def fingerprint(parts: Sequence[tuple[str, float]], by: Tokenizer) -> list[dict[str, Any]]:
    """Return the fingerprint of each source of a mixture, {"share", "files": [[name, bytes, digest], ...]}."""
    total = sum(weight for _, weight in parts)
    return [{"share": weight / total, "files": _listed(Path(path), by)} for path, weight in parts]


def _listed(path: Path, by: Tokenizer) -> list[list[Any]]:
    """Return [name, bytes, digest] of each file of a source; the files after the first LISTED share one row."""
    kind, files = check_data(path, by)
    if kind == "shards":
        index = shards_index(path, by)
        files = [path / name for name in (*index["tokens"], *index["counted"], index["starts"])]
    names = [file.name if file == path else str(file.relative_to(path)) for file in files]
    rows = [[name, file.stat().st_size, digest_of(file)] for name, file in zip(names, files, strict=True)]
    if rest := rows[LISTED:]:
        digest = blake2b(repr(rest).encode(), digest_size=16).hexdigest()
        rows[LISTED:] = [[f"the {len(rest):,} files after {rows[LISTED - 1][0]}", sum(row[1] for row in rest), digest]]
    return rows


def digest_of(path: Path) -> str:
    """Return a digest of a file's bytes, or of evenly spread blocks of them if the file is large."""
    size, found = path.stat().st_size, blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= WHOLE:
            found.update(file.read())
        else:
            for i in range(BLOCKS):
                file.seek((size - BLOCK) * i // (BLOCKS - 1))
                found.update(file.read(BLOCK))
    return found.hexdigest()


def differing_data(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> str:
    """Describe the files, sources or shares in which two fingerprints differ; return "" if there are none.

    `paths`: the paths of the sources of `now`.
    """
    if len(before) != len(now):
        return f"{len(before)} sources, not {len(now)}"
    found = []
    for one, other, path in zip(before, now, paths, strict=True):
        if [_content(row) for row in one["files"]] != [_content(row) for row in other["files"]]:
            found += _differing_files(one["files"], other["files"], path)
    shares = [[f"{source['share']:.3g}" for source in each] for each in (before, now)]
    if [source["share"] for source in before] != [source["share"] for source in now]:
        found.append(f"shares of {', '.join(shares[0])}, not {', '.join(shares[1])}")
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _content(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return (suffix, size, digest) of a file, by which its content is compared."""
    name, size, digest = row
    return Path(name).suffix, size, digest


def _differing_files(before: list, now: list, path: str) -> list[str]:
    if len(before) == len(now) == 1:
        return [f"{path} has changed ({before[0][1]:,} bytes, now {now[0][1]:,})"]
    one, other = ({row[0]: row[1:] for row in rows} for rows in (before, now))
    changes = [f"{Path(path, name)} was added" for name in other if name not in one]
    changes += [f"{Path(path, name)} was removed" for name in one if name not in other]
    changed = [name for name in one if name in other and one[name] != other[name]]
    changes += [f"{Path(path, name)} has changed ({one[name][0]:,} bytes, now {other[name][0]:,})" for name in changed]
    return changes or [f"the files of {path} are in another order"]
