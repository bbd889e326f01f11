"""The variables by which torchrun tells a process which rank it is: all of them, or none; a part is refused by name."""

import os
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
from refused import named

from scaling import launch
from scaling.book.page import Page
from scaling.common.torchrun import OTHERS, ThisRank, this_rank, without_torchrun  # noqa: F401 - a table names one
from scaling.mesh import Mesh
from scaling.train.command import main as train

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
ELASTIC = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_RUN_ID": "a"}
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
# an environment: how the process was started
READ = named(
    """
what                   environment, how the process was started
none                   ({}, ThisRank())
all                    (WHOLE, ThisRank(1, 2, 1))
torchrun's             (WHOLE | ELASTIC, ThisRank(1, 2, 1, 2, 3, True))
the second host's      (WHOLE | {"RANK": "3", "WORLD_SIZE": "4"} | ELASTIC, ThisRank(3, 4, 1, 2, 3, True))
one rank               (WHOLE | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ThisRank())
torchrun's in Slurm    (WHOLE | SLURM, ThisRank(1, 2, 1))
Slurm, a batch script  ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, ThisRank())
Slurm, one task        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ThisRank())
""",
    globals(),
)
# an environment: what the error says of it
REFUSED = named(
    r"""
what                         environment, what the error says of it
RANK alone
    ({"RANK": "1"}, "^RANK=1 is set, but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not\n")
a stale WORLD_SIZE
    ({"WORLD_SIZE": "4"}, "^WORLD_SIZE=4 is set, but RANK, LOCAL_RANK, (?s:.*)fix: unset WORLD_")
no RANK
    (WHOLE | {"RANK": None}, "^WORLD_SIZE=2, LOCAL_RANK=1, MASTER_.* are set, but RANK is not\n")
an empty WORLD_SIZE          (WHOLE | {"WORLD_SIZE": ""}, "^WORLD_SIZE='' is not a whole number from 1 to")
an empty WORLD_SIZE alone    ({"WORLD_SIZE": ""}, "^WORLD_SIZE= is set, but RANK")
no ranks                     (WHOLE | {"WORLD_SIZE": "0"}, "^WORLD_SIZE='0' is not a whole number from 1")
RANK is none
    (WHOLE | {"RANK": "one"}, "^RANK='one' is not a whole number from 0 to 1, WORLD_SIZE - 1\n")
RANK below 0                 (WHOLE | {"RANK": "-1"}, "^RANK='-1' is not a whole number")
RANK in other digits         (WHOLE | {"RANK": "²"}, "^RANK='²' is not a whole number")
RANK too great               (WHOLE | {"RANK": "2"}, "^RANK='2' is not a whole number from 0 to 1, WORLD_SIZE - 1\n")
LOCAL_RANK too great         (WHOLE | {"LOCAL_RANK": "2"}, "^LOCAL_RANK='2' is not .* to 1, WORLD_SIZE - 1\n")
LOCAL_RANK beside its size
    (WHOLE | {"LOCAL_WORLD_SIZE": "1"}, "^LOCAL_RANK='1' is not .* from 0 to 0, LOCAL_WORLD_SIZE - 1\n")
more ranks here than in all  (WHOLE | {"LOCAL_WORLD_SIZE": "3"}, "^LOCAL_WORLD_SIZE='3' is not .* from 1 to 2\n")
no port
    (WHOLE | {"MASTER_PORT": "http"}, "^MASTER_PORT='http' is not a whole number from 0 to 65535\n")
no address                   (WHOLE | {"MASTER_ADDR": ""}, "^MASTER_ADDR='' is not the address")
restarts
    (WHOLE | {"TORCHELASTIC_RESTART_COUNT": "x"}, "^TORCHELASTIC_RESTART_COUNT='x' is not a whole")
Slurm's first task
    (SLURM, r"^Slurm has started several processes \(SLURM_STEP_NUM_TASKS=2\), torchrun none\n")
Slurm's second task          ({"SLURM_PROCID": "1"}, r"^Slurm has started several processes \(SLURM_PROCID=1\)")
mpirun
    ({"OMPI_COMM_WORLD_SIZE": "2"}, r"^mpirun has started several (?s:.*)fix: let it start torchrun")
""",
    globals(),
)


@pytest.fixture
def environment(monkeypatch):
    """Let this process have these variables and no others of torchrun's or another launcher's."""

    def give(values) -> None:
        for name in {*os.environ} - {*without_torchrun(os.environ)} | {*chain(*OTHERS.values())}:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)

    return give


@pytest.mark.parametrize("name", READ)
def test_a_process_has_all_variables_or_none(name, environment):
    values, wanted = READ[name]
    environment(values)
    assert this_rank() == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_variables_are_refused_by_name(name, environment):
    values, words = REFUSED[name]
    environment(values)
    with pytest.raises(ValueError, match=words) as error:
        this_rank()
    assert re.search("\n  rule: torchrun gives every rank .*\n  fix: ", str(error.value))


def page():
    return Page("A chapter.", mesh="X=2")


USERS = {  # what reads the variables: what it raises
    "train": (lambda: sys.exit(train(["--data=text.txt", "--out=run", "--mesh=X=2"])), SystemExit),
    "a chapter": (page, SystemExit),
    "launch.start": (lambda: launch.start(print, {"X": 2}), SystemExit),
    "launch.run": (lambda: launch.run(print, {"X": 2}), ValueError),
    "launch.fit_mesh": (lambda: launch.fit_mesh({"X": 2}), ValueError),
    "Mesh": (lambda: Mesh({"X": 2}), ValueError),
}


@pytest.mark.parametrize("name", USERS)
def test_a_bad_environment_is_refused_before_anything_is_written(name, environment, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chapter.py"])
    Path("run/step-000002").mkdir(parents=True)
    Path("text.txt").write_text("some text, " * 100)
    before = sorted(tmp_path.rglob("*"))
    do, kind = USERS[name]
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        environment({"RANK": None, variable: value})
        with pytest.raises(kind) as error:
            do()
        assert f"{variable}={value} is set, but" in str(error.value) + capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
