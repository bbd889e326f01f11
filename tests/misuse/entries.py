"""The engine: what a random case is made of, types and operands in every layout and dtype; and a call of some room held
against its reference, with an argument spoiled on all ranks or on one alone.

What is not wrong gives the reference's numbers and changes no argument; what is wrong raises a ValueError with its fix.
"""

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from scaling import tree
from scaling.mesh import Mesh
from scaling.spec import Spec

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]
ODD = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.complex128]
# these are moved, and complex ones added; their other sums are refused
MODES = ["plain"] * 6 + ["no_grad", "inference", "flops", "autocast", "leaf", "vjp", "jvp", "vmap"]
MODES += ["in graph"] * 2  # the forms that a compiler follows, run without one


class AsOnNccl(Mesh):
    """A mesh over gloo whose collectives go the ways of NCCL. Unchecked: to compare calls NCCL needs a GPU."""

    def _make_group(self, axes):
        group = super()._make_group(axes)
        return group if group.pg is None else replace(group, backend="nccl")


def typed(dims, unreduced=(), name: str = "A") -> Spec:
    return Spec(name, tuple((dim, tuple(axes)) for dim, axes in dims), tuple(sorted(unreduced)))


class Draw(random.Random):
    """What all ranks draw alike, of calls on `mesh` that may write into `folder`."""

    mesh: Any = None
    folder = ""
    dtypes, modes, sizes = DTYPES * 3 + ODD, MODES, [0, 1, 2, 2, 4, 4, 6]

    @staticmethod
    def on(mesh, folder: str, seed) -> "Draw":
        draw = Draw(seed)
        draw.mesh, draw.folder = mesh, folder
        return draw

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.randrange(1 << 30))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(), dtype=torch.float64).to(self.mesh.device)

    def whole_numbers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.generator()).to(self.mesh.device)

    def spec(self, dims: int) -> tuple[Spec, list[int]]:
        """A type over the mesh's axes, and the shape of its shards; now and then a dim is a number."""
        mesh = self.mesh
        places: list[list[str]] = [[] for _ in range(dims + 2)]  # the dims', what is unreduced, what is in no place
        for axis in self.sample([*mesh.sizes], len(mesh.sizes)):
            self.choice(places).append(axis)
        local = [self.choice(self.sizes) for _ in range(dims)]
        names = list("IJK"[:dims])
        for i, (size, axes) in enumerate(zip(local, places, strict=False)):
            number = str((size + self.maybe(0.3)) * mesh.size(axes))
            if self.maybe(0.15) and number not in names:
                names[i] = number
        return typed(zip(names, places, strict=False), places[dims]), local

    def layout(self, x: torch.Tensor) -> torch.Tensor:
        """The same values, in memory in another way."""
        how = self.choice(["plain", "plain", "turned", "gaps", "inside", "lazy"])
        if how == "turned" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if how == "gaps" and x.dim():
            return torch.stack([x, x], -1)[..., 0]
        if how == "inside":
            return torch.cat([x.reshape(-1), x.reshape(-1)])[x.numel() :].view(x.shape)
        if how == "lazy" and x.is_complex():
            return x.conj().clone().conj()
        if how == "lazy" and x.dtype in (torch.float32, torch.float64):
            return torch.complex(torch.zeros_like(x), -x).conj().imag
        return x


class Wrong(Exception):
    """A number that is wrong, or a right call that was refused."""


class Entry(NamedTuple):
    """`make` draws right arguments, those of this rank on `draw.mesh`, and with them what is "wanted", unless `wanted`
    is a function of the arguments. `kinds` says how each may be spoiled for all ranks, `twists` how one alone may
    make another call: {what: other arguments, or a function (given, draw) of them}; what this rank gets of those that
    are `unheld` is its own. `messages`: whether ranks wait for messages of one rank."""

    make: Callable[[Draw], dict[str, Any]]
    call: Callable[..., Any]
    wanted: Callable[..., Any] | None = None
    kinds: Mapping[str, Callable] = MappingProxyType({})
    twists: Mapping[str, Any] = MappingProxyType({})
    unheld: Sequence[str] = ()
    messages: bool = False

    def drawn(self, draw: Draw) -> tuple[dict[str, Any], Any]:
        """(the arguments, what the call is to give)."""
        given = self.make(draw)
        return given, given.pop("wanted") if self.wanted is None else self.wanted(**given)


SPOILS: dict[str, Callable] = {  # what is given in the place of an argument
    "none": lambda _: None,
    "a text": lambda _: "x",
    # of a tensor
    "a list": torch.Tensor.tolist,
    "an array": lambda x: torch.zeros(x.shape).numpy(),
    "one dim more": lambda x: x[None],
    "flat": lambda x: x.reshape(-1),
    "elsewhere": lambda x: x.to("meta"),
    "sparse": lambda x: x.contiguous().to_sparse(),
    "complex": lambda x: x.to(torch.complex128),
    "floats": torch.Tensor.double,
    "float32": torch.Tensor.float,
    "ints": torch.Tensor.long,
    "bytes": lambda x: x.to(torch.uint8),
    "bools": lambda x: x > 0,
    "below 0": lambda x: x - 1000,
    "beyond": lambda x: x + 1000,
    "broadcast": lambda x: x[..., :1],
    "cut": lambda x: x[..., :-1],
    "fewer": lambda x: x[:-1],
    "empty": lambda x: x[:0],
    "twice": lambda x: torch.cat([x, x]),
    # the same tensor
    "a copy": torch.clone,
    "a leaf": lambda x: x.clone().requires_grad_(),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "turned": lambda x: x.T.contiguous().T,
    "int32": torch.Tensor.int,
    # of a number, a flag, a line
    "-1": lambda n: type(n)(-1),
    "a half more": lambda n: n + 0.5,
    "its text": str,
    "nan": lambda _: math.nan,
    "infinite": lambda _: math.inf,
    "true": lambda _: True,
    "one": lambda _: 1,
    "an axis Q": lambda line: line.replace("_X", "_Q"),
    "on Q": lambda _: "A[Z_Q]",
    "three dims": lambda _: "A[I, J, K]",
    "a dim Z": lambda line: line.replace("[", "[Z, "),
    "unreduced": lambda line: line + " {U_X}",
}


class Kind(NamedTuple):
    """What is wrong in the place of an argument, and what is right, and gives the same result."""

    wrong: str
    right: str = ""

    def __call__(self, draw: Draw, x) -> tuple[str, Any, bool]:
        """(how it is spoiled, the value, whether it is wrong)."""
        wrong = not (self.right and draw.maybe(0.3))
        how = draw.choice((self.wrong if wrong else self.right).split(", "))
        return how, SPOILS[how](x), wrong


OTHER = "a list, one dim more, elsewhere, sparse"  # in the place of any array
DENSE = Kind(f"{OTHER}, complex, ints, bools", "gaps, a leaf")  # a leaf of any sizes
FLOATS = Kind(f"{DENSE.wrong}, none, broadcast, cut", f"{DENSE.right}, a copy")
WEIGHTS = Kind(f"{OTHER}, complex, broadcast, cut", "gaps, a leaf")  # None, ints and bools may be weights, too
MASKED = Kind(f"{OTHER}, none, bools, fewer", "a leaf")  # of any size along its last dim, real or complex
IDS = Kind("none, a list, one dim more, floats, bools, bytes, below 0, beyond", "gaps, int32")
WHOLE_ARRAY = Kind("a text, one dim more, fewer, sparse", "gaps, a leaf, turned")
WHOLE = Kind("-1, true, a half more, its text, nan")
FLAG = Kind("a text, none, one")
POSITIVE = Kind("-1, nan, infinite, its text, true")
LINE = Kind("an axis Q, a dim Z")


def tree_of(kind: Callable) -> Callable:
    """A kind: a tree of tensors, of which one leaf is spoiled, or gone, or all are under other names."""

    def spoiled(draw: Draw, given: dict) -> tuple[str, Any, bool]:
        leaves = tree.leaves(given)
        at = draw.randrange(len(leaves))
        if draw.maybe(0.2):
            return "another name", {("z" + name): part for name, part in given.items()}, True
        if draw.maybe(0.1):
            return "no tree", draw.choice([None, 3, []]), True
        how, value, wrong = kind(draw, leaves[at])
        others = iter([value if i == at else x for i, x in enumerate(leaves)])
        return f"leaf {at} {how}", tree.map(lambda _: next(others), given), wrong

    return spoiled


PARAMS = tree_of(FLOATS)
EVERY = "twice, float32, one dim more, a leaf, empty, ints"


def spoils(names: str, how: str = EVERY) -> dict[str, Callable]:
    """Twists that make other tensors of these arguments."""

    def of(f: Callable):
        return lambda given, draw: {name: tree.map(f, given[name]) for name in names.split()}

    return {each: of(SPOILS[each]) for each in how.split(", ")}


def others(**values) -> dict[str, dict]:
    """Twists that give an argument another value."""
    return {name: {name: value} for name, value in values.items()}


def compare(found, wanted, what: str) -> None:
    for ours, theirs in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        a, b = ours.detach().double(), theirs.double()
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9):
            raise Wrong(f"another number: {what}\n{ours}\n{theirs}")


def twisted(draw: Draw, name: str, entry: Entry, twist: str) -> None:
    """The call of a rank that makes it in another way; as it should be, if `twist` is ""."""
    given, wanted = entry.drawn(draw)
    change = entry.twists[twist] if twist else {}
    found = entry.call(**given | (change(given, draw) if callable(change) else change))
    if found is not None and twist not in entry.unheld:
        compare(found, wanted, f"{name}: {twist}")


def called(draw: Draw, name: str, entry: Entry) -> str:
    """The call with one argument spoiled, or none; its outcome in words. Raises Wrong."""
    given, wanted = entry.drawn(draw)
    how, wrong, spoiled = "as it should be", False, ""
    if draw.maybe(0.8):
        spoiled = draw.choice(list(entry.kinds))
        how, given[spoiled], wrong = entry.kinds[spoiled](draw, given[spoiled])
    what = f"{name}: {spoiled} {how}"
    kept = [x.detach().clone() for x in tree.leaves(given) if is_plain(x)]
    try:
        found = entry.call(**given)
    except ValueError as error:
        if not wrong:
            raise Wrong(f"refused: {what}\n{error}") from error
        if "fix:" not in str(error) and "unknown mesh axis" not in str(error):
            raise Wrong(f"refused without a fix: {what}\n{error}") from error
    except Exception as error:
        raise Wrong(f"an error that says nothing: {what}\n{type(error).__name__}: {error}") from error
    else:
        if wrong:
            raise Wrong(f"accepted: {what}\n{found}")
        compare(found, wanted, what)
    if not all(map(torch.equal, kept, filter(is_plain, tree.leaves(given)))):
        raise Wrong(f"an argument was changed: {what}")
    return f"{name}: {'refused' if wrong else 'right'}"


def is_plain(x) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta


def tried(case: Callable[[int], str], cases: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of `cases` calls of `case(number)`."""
    outcomes, failures = Counter(), []
    with warnings.catch_warnings():  # torch's own, of its tracers and of complex numbers cut off
        warnings.simplefilter("ignore")
        for number in range(cases):
            try:
                outcomes[case(number)] += 1
            except Wrong as error:
                failures.append(f"case {number}: {error}")
    return outcomes, failures
