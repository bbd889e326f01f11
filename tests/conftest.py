"""`ranks(fn, {"X": 2, "Y": 2}, *args)`: call `fn(mesh, *args)` on ranks that are forked once and reused by all tests.

A test whose first argument is `mesh`, parametrized as {"X": 2, "Y": 2}, runs on these ranks itself, each with its mesh;
a mark of warnings holds there for the ranks that it is the first to start, and for all that they run.
Functions are pickled by name, so they stand at the top of their test module. A test that makes a rank fail ends its
ranks; the next test gets new ones. Collectives are checked: ranks that disagree raise instead of hanging.
"""

import gc
import importlib
import inspect
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import connection

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import RankFailed, share_gloo_device

from scaling.common import console, torchrun
from scaling.launch.ranks import end_with_parent, ready_to_fork
from scaling.mesh import Mesh, join_world

os.environ["COLUMNS"] = "100"  # what is printed is folded there
os.environ["SCALING_CACHE"] = ""  # each test computes its results itself
torch.set_num_threads(1)
torch.manual_seed(0)  # for what is drawn while tests are collected: two workers must collect the same ones
if not torch.cuda.is_available():  # at the first gradient autograd counts GPUs, for threads; later there are fake ones
    torch.ones(1, requires_grad=True).sum().backward()


IMPORTED_BY_RANKS = (  # each rank would import them by itself: for the first jvp, torch.compile and torch's pipelines
    "torch._decomp.decompositions_for_jvp",
    "functorch.compile",
    "torch._dynamo.backends.debugging",
    "torch.distributed.pipelining",
)


def _work(rank: int, world: int, folder: str, pipe, parent: int) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)
    share_gloo_device()
    for name in {*os.environ} - {*torchrun.without_torchrun(os.environ)}:  # a test may have set them
        del os.environ[name]
    join_world("cpu", 60, dist.FileStore(f"{folder}/store", world), rank, world)
    meshes = {}
    while job := pipe.recv_bytes():
        try:
            fn, sizes, args = pickle.loads(job)
            key = tuple(sizes.items())
            if key not in meshes:
                meshes[key] = Mesh(sizes, checked=True, timeout=60)
            answer = True, fn(meshes[key], *args)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            pipe.send_bytes(pickle.dumps(answer))
        except BrokenPipeError:
            break
    os._exit(0)


class Workers:
    """`world` forked processes, each one rank of one process group."""

    def __init__(self, world: int):
        ready_to_fork()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            for module in IMPORTED_BY_RANKS:
                importlib.import_module(module)
        context = mp.get_context("fork")
        self.folder = tempfile.TemporaryDirectory(prefix="test-ranks-")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, world, self.folder.name, theirs, os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn, sizes, args) -> list:
        job = pickle.dumps((fn, sizes, args))
        for pipe in self.pipes:
            pipe.send_bytes(job)
        results, waiting = {}, {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            if not (ready := connection.wait([*waiting], timeout=90)):
                raise RankFailed(f"ranks {sorted(waiting.values())} of {sizes} did not answer")
            for rank, pipe in sorted((waiting.pop(pipe), pipe) for pipe in ready):
                try:
                    ok, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, results[rank] = False, "the process died"
                if not ok:
                    raise RankFailed(f"rank {rank} of {sizes}:\n{results[rank]}")
        return [results[rank] for rank in range(len(self.pipes))]

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


@pytest.fixture(scope="session")
def ranks():
    """Those of one number of ranks run at a time; gloo's threads wake a hundred times a second, also of ranks that wait
    for work, so the others stand still."""
    workers: dict[int, Workers] = {}
    awake = 0

    def run(fn, sizes, *args):
        nonlocal awake
        world = math.prod(sizes.values())
        if world == 1:
            return [fn(Mesh(sizes), *args)]
        if world not in workers:
            sys.stdout.flush()
            workers[world] = Workers(world)
        elif awake != world:
            workers[world].signal(signal.SIGCONT)
        if awake != world and awake in workers:
            workers[awake].signal(signal.SIGSTOP)
        awake = world
        try:
            return workers[world].run(fn, sizes, args)
        except BaseException:
            workers.pop(world).end()
            raise

    yield run
    for each in workers.values():
        each.end()


def of_ranks(item) -> bool:
    """Whether a test itself runs on ranks: its first argument is a `mesh` of sizes."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return isinstance(given.get("mesh"), dict) and next(iter(inspect.signature(item.obj).parameters)) == "mesh"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not of_ranks(pyfuncitem):
        return None
    sizes, *args = (pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters)
    answers = pyfuncitem.funcargs["ranks"](pyfuncitem.obj, sizes, *args)
    assert set(answers) == {None}, "a test on ranks asserts, and returns nothing"
    return True


gc.disable()  # what is imported and collected stays to the end: the collector need not look through it time and again


@pytest.fixture(autouse=True)
def errors_unfolded(request, monkeypatch):
    """Where an error is folded hangs on how long the paths are that it names. Two modules test that it is."""
    if request.path.name not in ("test_console.py", "test_page.py"):
        monkeypatch.setattr(console, "_folded", str)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """All tests run in two processes, where pytest-xdist is installed and nothing else is asked for (-n 0, --pdb, -s,
    -k, files)."""
    asked = config.option
    everything = config.args_source is config.ArgsSource.TESTPATHS and not asked.keyword and asked.markexpr != "sweep"
    silent = not asked.usepdb and asked.capture != "no" and not hasattr(config, "workerinput")
    if everything and silent and getattr(asked, "numprocesses", 0) is None:
        os.environ["PYTHONHASHSEED"] = "0"  # both must collect the same tests
        asked.numprocesses, asked.dist = 2, "worksteal"


def pytest_collection_finish(session):
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """What a module's tests leave, such as caches, is not looked through again either."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def computed(seconds: float) -> float:
    """The seconds that this process's other threads computed for during a wait."""
    before = time.process_time() - time.thread_time()
    time.sleep(seconds)
    return time.process_time() - time.thread_time() - before


@pytest.hookimpl(trylast=True, specname="pytest_runtest_teardown")
def pytest_no_thread_computes(item, nextitem):
    """A thread that a module leaves computing would slow every later test of its process until some time out."""
    if (nextitem is None or nextitem.path != item.path) and computed(0.01) > 0.001 and computed(0.5) > 0.05:
        pytest.fail(f"{item.path.name} leaves a thread that computes: {threading.enumerate()}", pytrace=False)


def pytest_collection_modifyitems(config, items):
    """What runs on ranks is slow. What is marked sweep, or runs a chapter, runs only if its mark is asked for."""
    for item in items:
        if of_ranks(item):
            item.fixturenames.append("ranks")
        if "ranks" in item.fixturenames:
            item.add_marker("slow")
    unasked = [mark for mark in ("sweep", "chapter") if mark not in config.option.markexpr]
    left_out = dict.fromkeys(item for item in items if any(map(item.get_closest_marker, unasked)))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
