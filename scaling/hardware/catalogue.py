"""Look up chips: `chip("v5p")`, `chip("v6e:part1")` for another value of the book, or a file of yours.

The numbers are in chips.toml, each with its source in the book or from its vendor. `load_chip` reads a file of the same
form.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

from scaling.common.arguments import of_type, one_of, read_table
from scaling.hardware.chip import CHIP_KINDS, Chip, Efficiency, Level, Measured
from scaling.spec import DTYPE_BYTES

STRUCTURE = {"base": str, "variants": dict, "flops": dict, "efficiency": dict, "levels": list, "measured": list}
STRUCTURE |= {"name": str, "pod": list, "slices": list, "host": list}
ALSO = {"trainium2": "trn2", "trillium": "v6e", "ironwood": "7x", "v7x": "7x", "mi300": "mi300x"}  # other names
CLASS = {"gpu": "a100", "tpu": "v5p"}  # whose efficiency a chip of this kind has that gives none
NEEDED = {"tpu": ("axes", "link_bw", "wrap"), "gpu": ("levels",), "cpu": ()}  # plans also need hbm_bytes and flops


def chip(name: str, variant: str | None = None) -> Chip:
    """Return a chip of the book by its name ("v5p", "h100:hbm2e"), or of a TOML file by its path ("mine.toml").

    Args:
        name: The name or the path, and after a colon perhaps the variant.
        variant: The name of another value that the book's text uses, as in chip("v6e", "part1").

    Raises:
        ValueError: The name or the variant is unknown; the message lists the known ones.
    """
    name, colon, after = str(name).partition(":") if variant is None else (str(name), "", "")
    variant = after if colon else variant
    if name.endswith(".toml"):
        return load_chip(name, variant)
    key = re.sub(r"nvidia|geforce|amd|tpu|rtx|sxm\d?|[ _-]", "", name.lower())
    key = next((known for known in registry() if key == known.removeprefix("rtx")), ALSO.get(key, key))
    if key not in registry():
        raise ValueError(
            f"unknown chip {name!r}\n  fix: give one of {', '.join(registry())}, or the path of a .toml file"
        )
    return build(key, registry()[key], variant)


def chips() -> tuple[str, ...]:
    """Return the names of the book's chips."""
    return tuple(registry())


def load_chip(path: str | Path, variant: str | None = None) -> Chip:
    """Read a chip from a TOML file of the fields of `Chip`, with `[flops]` by dtype, `[[levels]]`, `[[measured]]`.

    `base = "h100"` starts from a chip of the book, so that the file gives only the fields that differ:

        base = "h100"
        name = "our-h100"
        hbm_bw = 3.1e12
        [flops]
        bf16 = 8.0e14
    """
    data = read_table(path)
    try:
        built = build(data.get("name", Path(path).stem), data, variant)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    missing = [key for key in ("hbm_bytes", *NEEDED[built.kind]) if getattr(built, key) in (None, (), 0)]
    missing += [] if built.peaks else ["flops"]
    if missing:
        raise ValueError(
            f"{path}: a {built.kind} needs {', '.join(missing)}; fix: add them, in SI units, or give a base"
        )
    return built


@cache
def registry() -> Mapping[str, dict]:
    """Return the tables of chips.toml by the chips' names."""
    return tomllib.loads(Path(__file__).with_name("chips.toml").read_text(encoding="utf-8"))


def _merge(below: Mapping, above: Mapping) -> dict:
    """Merge two tables: `above` wins, and the tables flops and efficiency inside them are merged key by key."""
    both = dict(below) | dict(above)
    for table in ("flops", "efficiency"):
        if table in below and table in above:
            both[table] = below[table] | above[table]
    return both


def _resolve(data: Mapping) -> dict:
    """Return a table merged over its base, which is itself merged over its own base, and so on."""
    for key, kind in STRUCTURE.items():
        of_type(key, data.get(key, kind()), kind)
    if (base := data.get("base")) is None:
        return dict(data)
    one_of("base", base, registry())
    below = _resolve(registry()[base])
    return _merge({key: value for key, value in below.items() if key not in ("variants", "source")}, data)


def build(name: str, data: Mapping, variant: str | None = None) -> Chip:
    """Build the Chip that a table of a TOML file describes; ValueError for a key or a value that it cannot have."""
    data = _resolve(data)
    if variant is not None:
        if variant not in data.get("variants", {}):
            raise ValueError(
                f"{name} has no variant {variant!r}: it has {', '.join(data.get('variants', {})) or 'none'}"
                "\n  fix: choose one of them, or leave it out"
            )
        data = _merge(data, data["variants"][variant])
    data = {key: value for key, value in data.items() if key not in ("base", "variants", "name")}
    if not data.get("efficiency") and (like := CLASS.get(data.get("kind", ""))):
        data |= {"efficiency": registry()[like]["efficiency"], "efficiency_of": like}
    peaks, rates = data.pop("flops", {}), dict(data.pop("efficiency", {}))
    allowed = {field.name for field in fields(Chip)} - {"name", "peaks", "efficiency"}
    if unknown := set(data) - allowed | set(peaks) - set(DTYPE_BYTES):
        raise ValueError(
            f"unknown field {sorted(unknown)}: fields are {', '.join(sorted(allowed))}, and flops.<dtype>"
            '\n  fix: rename the field, or leave it out; base = "h100", say, gives all that the file does not'
        )
    one_of("kind", data.get("kind"), CHIP_KINDS)
    for key in ("pod", "slices", "host"):
        if key in data:
            data[key] = tuple(data[key])
    data["levels"] = tuple(_part(Level, "levels", level) for level in data.get("levels", ()))
    data["measured"] = tuple(_part(Measured, "measured", row) for row in data.get("measured", ()))
    if "matmul" in rates:
        rates["matmul"] = (
            tuple(rates["matmul"].items()) if isinstance(rates["matmul"], dict) else (("bf16", rates["matmul"]),)
        )
    return Chip(name=name, peaks=tuple(peaks.items()), efficiency=_part(Efficiency, "efficiency", rates), **data)


def _part(record: type, table: str, values: Mapping):
    """Build a Level, a Measured or an Efficiency from its table; ValueError names an unknown or a missing key."""
    of_type(table, values, dict)
    known = {field.name: field for field in fields(record)}
    if unknown := set(values) - set(known):
        raise ValueError(
            f"unknown field {sorted(unknown)} in {table}: its fields are {', '.join(known)}"
            "\n  fix: rename the field, or leave it out"
        )
    if lacking := [name for name, field in known.items() if name not in values and field.default is MISSING]:
        raise ValueError(f"{table} lacks {', '.join(lacking)}\n  fix: add them to the table")
    return record(**values)


CHIPS = f"{', '.join(chips())}; with a variant as in h100:hbm2e; or a .toml file"  # of an option's help
