"""What a checkpoint was made with: its options, its model, its tokenizer and the data that its params have learned.

The index of each step holds this record. A run that goes on makes its own record and compares the two, before anything
in its folder is written. An older checkpoint has no record: its run.toml, its model and its leaves are compared.
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
from scaling.models.ends import NO_END, chosen_end
from scaling.models.template import chat_template
from scaling.train import checkpoint, dcp
from scaling.train.durable import newest_first, step_name
from scaling.train.fingerprint import differing_data, digest_of, fingerprint
from scaling.train.origin import config_of_run, options_of, tokenizer_in, weighted_paths
from scaling.train.settings import DTYPES, Settings, rate

# The options that a run keeps to its end:
FIXED = ("dtype", "eos_id", "lora", "lora_alpha", "lora_on", "no_template", "optimizer", "seed", "seq")
# Those that may change at any step:
FREE = ("batch", "clip", "decay_steps", "lr", "schedule", "steps", "warmup", "weight_decay")
KEPT = ("base model", "chat template", "tokenizer")  # what else a run keeps to its end
SCHEDULE = ("decay_steps", "lr", "schedule", "warmup")  # the options that, with steps, give the learning rate


def record_of(settings: Settings) -> dict[str, Any]:
    """Return the record of what a run with these settings makes checkpoints with, as JSON gives it back."""
    by, options = tokenizer_in(settings), {name: getattr(settings, name) for name in (*FIXED, *FREE)}
    options |= {"dropout": settings.model.dropout, "eos_id": chosen_end(by, settings.eos_id)}
    found = {"options": options, "model": _sizes(settings.model), "tokenizer": by.identity}
    found["data"] = fingerprint(weighted_paths(settings.data), by)
    if settings.adapters and settings.weights:
        found["base model"] = weights_digest(Path(settings.weights))
    if any(Path(name).suffix == ".jsonl" for source in found["data"] for name, *_ in source["files"]):
        template = None if settings.no_template or not by.folder else chat_template(by.folder)
        said = template and json.dumps([dict(template.templates), template.tokens], sort_keys=True)
        found["chat template"] = said and blake2b(said.encode(), digest_size=16).hexdigest()
    return json.loads(json.dumps(found))


def weights_digest(folder: Path) -> list[str]:
    """Return a digest of each file of weights in a folder, to which a run's adapters belong."""
    return [digest_of(path) for path in sorted(folder.glob("*.safetensors"))]


def recorded(out: Path, step: int | None) -> dict[str, Any]:
    """Return the record of a step; without a step, of the model and the tokenizer that the run's folder keeps.

    An older step has no record, and then only what else is known of it is returned.
    """
    content = checkpoint.index(out, step) if step is not None else {}
    if "made_with" in content:
        return content["made_with"]
    kept, found = options_of(out) if (out / RUN).is_file() else {}, {}
    if kept.get("identity") is not None:
        found = {"model": _sizes(config_of_run(out)), "tokenizer": kept["identity"]}
    if step is not None:
        first = {"eos_id": NO_END, "no_template": True}  # how documents were read before run.toml said so
        known = first | kept | _of_state(out, step)
        found["options"] = {name: known[name] for name in (*FIXED, *FREE) if name in known}
    return json.loads(json.dumps(found))


def resumable(settings: Settings) -> list[int]:
    """Return the steps from which a run goes on, the first that is whole of these; none for one that begins."""
    if settings.resume and settings.step and not this_rank().restarts:  # torchrun's restarts go on from the latest
        return [settings.step]
    return newest_first(Path(settings.out)) if settings.resume else []


def first_recorded(out: Path, steps: Sequence[int]) -> tuple[int | None, dict[str, Any]]:
    """Return the first of these steps whose record can be read, and the record; without steps, None and what the folder
    keeps. The first step's error if none can be read."""
    errors = []
    for step in steps:
        try:
            return step, recorded(out, step)
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return None, recorded(out, None)


def _of_state(out: Path, step: int) -> dict[str, Any]:
    """Return the options that the state of a step itself shows: run.toml may have been rewritten since."""
    leaves = dcp.saved_leaves(out / step_name(step))
    names = {dtype: name for name, dtype in DTYPES.items()}
    seed = checkpoint.index(out, step)["values"].get('state["data"]["seed"]')
    dtype = next((names.get(leaf.dtype) for name, leaf in leaves.items() if name.startswith("params.")), None)
    muon = any(name.startswith("optimizer.momentum.") for name in leaves)
    found = {"dtype": dtype, "optimizer": "muon" if muon else "adamw", "seed": seed}
    return {name: value for name, value in found.items() if value is not None}


def _sizes(config: Config) -> dict[str, Any]:
    """Return what makes a model this one: all of its config by which two compare, but its names and its dropout."""
    compared = [field.name for field in fields(config) if field.compare]
    return {name: asdict(config)[name] for name in compared if name not in ("name", "source", "dropout")}


def check_options_kept(out: Path, before: Mapping[str, Any]) -> None:
    """Raise ValueError if the run.toml of a run that goes on lacks options that its checkpoint was made with."""
    there = (out / RUN).is_file() and (out / RUN).read_bytes().endswith(b"\n")
    had = before["options"] if "data" in before else {}  # an older checkpoint does not say which it had
    if not there or any(name not in options_of(out) for name in had):
        raise ValueError(
            f"{out / RUN}: is missing or cut short: it does not say with which options the checkpoints were made\n"
            "  fix: put it back, or begin another run with another --out"
        )


def check_unchanged(settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError that names everything in which a run that goes on differs from the record of its checkpoint.

    Only what both records have is compared; other data are right with --new-data.
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
    """Return in what the data that a checkpoint was made with differ from today's, in words; "" if in nothing."""
    if "data" not in before:
        return ""
    return differing_data(before["data"], now["data"], [path for path, _ in weighted_paths(settings.data)])


def begins_new_data(settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a run that goes on begins a new epoch of other data; an older checkpoint does not say of which."""
    return settings.new_data and bool(before) and ("data" not in before or bool(changed_data(settings, before, now)))


def option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the options that may change and have changed since a checkpoint, in words; "" if none has."""
    found = _changed(before, now, (*FREE, "dropout"))
    return ", ".join(f"{_flag(name)} {given}, not {then}" for name, then, given in found)


def rate_change(settings: Settings, before: Mapping[str, Any], step: int) -> str:
    """Return how other --steps, which stretch the fall of the learning rate, change it after a step; "" if not."""
    there = {"decay_steps": 0} | before.get("options", {})
    if any(there.get(name) != getattr(settings, name) for name in SCHEDULE):
        return ""
    asked = replace(settings, steps=there.get("steps", settings.steps))
    was, becomes = (rate(each)(torch.tensor(step)).item() for each in (asked, settings))
    said = f"the learning rate of step {step + 1} is {becomes:.3g}, where it was to be {was:.3g}"
    return "" if was == becomes else f"{said}: --decay-steps {asked.steps} lets it fall as before"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _changed(before: Mapping, now: Mapping, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    there = before.get("options", {})
    return _differing({name: there[name] for name in names if name in there}, now["options"])


def _differing(before: Mapping, now: Mapping) -> list[tuple[str, Any, Any]]:
    """Return [(name, value before, value now)] of the names that both have with other values."""
    return [(name, then, now[name]) for name, then in before.items() if name in now and now[name] != then]
