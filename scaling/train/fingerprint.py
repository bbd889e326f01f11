"""Identify the data that a run reads, by the size and a digest of each file in the order of reading.

A file of at most 8 MiB is hashed whole. In a larger file only 64 blocks of 64 KiB are hashed, spread evenly from its
first byte to its last, so that a large corpus takes seconds. A change outside these blocks that keeps the size is not
detected. The paths of the files do not matter, except for their suffixes, as long as the order is the same.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from scaling.models.text import Tokenizer
from scaling.train.corpus import check_data, shards_index

WHOLE, BLOCK, BLOCKS = 1 << 23, 1 << 16, 64  # bytes hashed whole; bytes and number of the blocks of a larger file
LISTED = 1000  # files of a source that are listed one by one; the rest share one digest
SHOWN = 4  # differing files that an error names


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
    said = [f"{Path(path, name)} was added" for name in other if name not in one]
    said += [f"{Path(path, name)} was removed" for name in one if name not in other]
    changed = [name for name in one if name in other and one[name] != other[name]]
    said += [f"{Path(path, name)} has changed ({one[name][0]:,} bytes, now {other[name][0]:,})" for name in changed]
    return said or [f"the files of {path} are in another order"]
