"""The one reader of the variables by which torchrun tells a process which rank it is.

A process has all of these variables, as torchrun sets them, or none and is alone. A process with some of them, left in
a shell by an earlier run, would take itself for one rank of a run that does not exist. That is refused.
"""

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # every rank needs them
MOST_RANKS = 2**20  # ranks
TORCHRUN_GIVES = (
    f"torchrun gives every rank that it starts {', '.join(GIVEN[:-1])} and {GIVEN[-1]}; other processes have none"
)
OTHERS = {  # other launchers' variables: the number of processes, and this process's number
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}


class ThisRank(NamedTuple):
    """A process's rank, the number of ranks, and how the process was started.

    `local_rank` and `local_size` count the ranks of this machine; a size of 0 means unknown. `restarts` is how often
    torchrun has started the ranks again.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    restarts: int = 0
    by_torchrun: bool = False


def this_rank() -> ThisRank:
    """Read how this process was started. Raise a ValueError if its variables contradict each other."""
    given = [name for name in GIVEN if name in os.environ]
    if not given:
        _refuse_other_launchers()
        return ThisRank()
    if missing := [name for name in GIVEN if name not in os.environ]:
        what = f"{_several([f'{name}={os.environ[name]}' for name in given])} set, but {_several(missing)} not"
        fix = f"unset {' '.join(given)} to run as one process, or start the ranks by torchrun"
        raise ValueError(f"{what}\n  rule: {TORCHRUN_GIVES}\n  fix: {fix}")
    if not os.environ["MASTER_ADDR"]:
        _refuse("MASTER_ADDR", "the address of the host where the ranks meet")
    _number("MASTER_PORT", 0, 2**16 - 1)
    size = _number("WORLD_SIZE", 1, MOST_RANKS)
    local_size = _number("LOCAL_WORLD_SIZE", 1, size) if "LOCAL_WORLD_SIZE" in os.environ else 0
    return ThisRank(
        _number("RANK", 0, size - 1, ", WORLD_SIZE - 1"),
        size,
        _number("LOCAL_RANK", 0, (local_size or size) - 1, f", {'LOCAL_' if local_size else ''}WORLD_SIZE - 1"),
        local_size,
        _number("TORCHELASTIC_RESTART_COUNT", 0, MOST_RANKS) if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0,
        "TORCHELASTIC_RUN_ID" in os.environ,
    )


def first_rank() -> bool:
    """Return whether this process is torchrun's rank 0, which alone prints, or is alone."""
    return this_rank().rank == 0


def world_size() -> int:
    """Return the number of ranks that torchrun has started; 1 for a process that is alone."""
    return this_rank().size


def this_host() -> str:
    """Return this host's name, with the address at which the other hosts see it if torchrun names one."""
    name = socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((os.environ.get("MASTER_ADDR", ""), 9))
            address = probe.getsockname()[0]
    except OSError:  # the address cannot be resolved or reached, or is not IPv4
        return name
    return name if address.startswith("127.") else f"{name} ({address})"


def as_rank(environment: Mapping[str, str], rank: int, size: int, port: int) -> dict[str, str]:
    """Return an environment with the variables of one of `size` ranks on this machine and no others of torchrun."""
    values = str(rank), str(size), str(rank), "127.0.0.1", str(port)
    return {**without_torchrun(environment), **dict(zip(GIVEN, values, strict=True)), "LOCAL_WORLD_SIZE": str(size)}


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without torchrun's variables."""
    theirs = (*GIVEN, "LOCAL_WORLD_SIZE")
    return {k: value for k, value in environment.items() if k not in theirs and not k.startswith("TORCHELASTIC")}


def _number(name: str, least: int, most: int, why: str = "") -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        _refuse(name, f"a whole number from {least} to {most}{why}")
    return int(text)


def _refuse(name: str, wanted: str) -> None:
    fix = f"unset {' '.join(GIVEN)} to run as one process, or start the ranks by torchrun"
    raise ValueError(f"{name}={os.environ[name]!r} is not {wanted}\n  rule: {TORCHRUN_GIVES}\n  fix: {fix}")


def _refuse_other_launchers() -> None:
    """Raise a ValueError if another launcher has started several processes, since each would run the whole job."""
    for launcher, (count, number) in OTHERS.items():
        found = [name for name, least in ((count, 2), (number, 1)) if _at_least(os.environ.get(name, ""), least)]
        if found:
            what = f"{launcher} has started several processes ({found[0]}={os.environ[found[0]]}), torchrun none"
            fix = "let it start torchrun once on each machine, as docs/from-laptop-to-cluster.md shows for Slurm"
            raise ValueError(f"{what}\n  rule: {TORCHRUN_GIVES}\n  fix: {fix}, or start one process")


def _at_least(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and int(text[:9]) >= least


def _several(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]} are" if len(words) > 1 else f"{words[0]} is"
