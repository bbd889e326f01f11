"""What an explicit array or a program in auto mode would take for something else: refused with its fix, or right."""

import torch
from refused import refused

from scaling import auto, explicit
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

MESH, OTHER = Mesh({"X": 1, "Y": 1}), Mesh({"Y": 1, "X": 1})
WHOLE = torch.arange(32.0).view(8, 4) / 7
X, SQUARE = explicit.array(WHOLE, "[8_X, 4_Y]", MESH), explicit.array(torch.ones(4, 4), "[4_X, 4]", MESH)
VALUES = {  # an array decides nothing in Python
    "bool": bool,
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "range": lambda x: range(x.sum()),
}


def traced(use):
    return auto.jit(lambda x: x * use(x), MESH, ("[8_X, 4]",))(WHOLE)


def pulled(dy):
    return explicit.vjp(lambda x: x * 2, X)[1](dy)


def abstract(shape, type):
    return explicit.array(torch.empty(shape), type, AbstractMesh({"X": 4, "Y": 2}))


CALLS = {name: lambda use=use: use(X) for name, use in VALUES.items()}
CALLS |= {f"traced {name}": lambda use=VALUES[name]: traced(use) for name in ("if", "item")}
CALLS |= {
    "a cotangent that is none": lambda: pulled(None),
    "a plain cotangent": lambda: pulled(WHOLE),
    "a cotangent of another dtype": lambda: pulled(explicit.array(WHOLE.double(), "[8_X, 4]", MESH)),
    "a cotangent of another shape": lambda: pulled(explicit.array(WHOLE[:1], "[1, 4]", MESH)),
    "a cotangent on another mesh": lambda: pulled(explicit.array(WHOLE, "[8_X, 4]", OTHER)),
    "other bits": lambda: X.view(torch.int32),
    "no such dim": lambda: X.sum(9),
    "sizes that do not meet": lambda: X @ X,
    "an index beyond": lambda: X[9],
    "an array of an array": lambda: explicit.array(X, "[8, 4]", MESH),
    "of numpy": lambda: explicit.array(WHOLE.numpy(), "[8, 4]", MESH),
    "of a number": lambda: explicit.array(3.0, "[]", MESH),
    "sparse": lambda: explicit.array(WHOLE.to_sparse(), "[8, 4]", MESH),
    "of no numbers": lambda: explicit.array(WHOLE.to("meta"), "[8, 4]", MESH),
    "on no mesh": lambda: explicit.array(WHOLE, "[8, 4]", {"X": 1}),
    "a type that is none": lambda: explicit.reshard(X, None),
    "a plain one of other sizes": lambda: explicit.reshard(WHOLE, "[9, 4]"),
    "a text": lambda: explicit.reshard("x", "[1]"),
    "a gradient in ints": lambda: explicit.grad(lambda x: x.sum())(explicit.array(WHOLE.int(), "[8_X, 4]", MESH)),
    "a gradient in what is not given": lambda: explicit.grad(lambda x: x.sum(), 5)(X),
    "a gradient in a text": lambda: explicit.grad(lambda x: x.sum(), "0")(X),
    "a number to jit": lambda: auto.jit(lambda x, y: x * y, MESH, ("[8, 4]", None))(WHOLE, 2.0),
    "nothing to jit": lambda: auto.jit(lambda x, y: x, MESH, ("[8, 4]", None))(WHOLE, None),
    "nothing from jit": lambda: auto.jit(lambda x: None, MESH, ("[8, 4]",))(WHOLE),
    "jit on no mesh": lambda: auto.jit(lambda x: x, {"X": 1}, ("[8, 4]",))(WHOLE),
}
TYPES = {  # words of the error
    "a size that does not divide": (lambda: abstract((8, 3), "[8_X, 3_Y]"), "dim 3 of size 3 does not divide"),
    "another size": (lambda: abstract((8, 2), "[4_X, 2_Y]"), "says 4 where the array"),
    "a dim too few": (lambda: abstract((8, 2), "[8_X]"), "1 dims"),
    "another dtype": (lambda: abstract((8, 2), "float64[8_X, 2]"), "fix: convert it, x.to(torch.float64)"),
    "an axis that the mesh lacks": (lambda: abstract((8, 2), "[8_Z, 2]"), "unknown mesh axis Z"),
    "a plain operand": (lambda: X + torch.ones(8, 4), "fix: explicit.array(x, type, mesh)"),
    "two meshes": (lambda: X + explicit.array(WHOLE, "[8, 4]", OTHER), "the arrays are on two meshes"),
}
NOT_IN_THE_TABLE = {"rand_like": 1, "kron": 2, "where": 1}  # functions, of so many arrays
TYPES |= {
    name: (
        lambda name=name, n=n: getattr(torch, name)(*(SQUARE,) * n),
        f"{name}: not a function whose sharding is known",
    )
    for name, n in NOT_IN_THE_TABLE.items()
}
test_calls_without_a_result_are_refused = refused(CALLS)
test_types_that_do_not_fit_are_refused = refused(TYPES, ShardingError)


def test_what_no_array_has_is_no_attribute():
    assert not hasattr(X, "nothing")


def test_an_array_has_memory_of_its_own():
    given = WHOLE.clone()
    explicit.array(given, "[8, 4]", MESH).local.add_(1)
    auto.jit(lambda x: x, MESH, ("[8, 4]",))(given).add_(1)
    assert torch.equal(given, WHOLE)


def test_a_mean_has_the_dtype_that_is_asked_for():
    for dims in (None, 0, (0, 1)):
        found = X.mean(dims, dtype=torch.float64).whole()
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, WHOLE.double().mean(dims), rtol=1e-12, atol=0)


def test_a_plain_tensor_passes_where_its_type_fits():
    square = torch.ones(4, 4)
    assert explicit.reshard(square, "[4_X, 4]") is square
    assert explicit.reshard(square, "float32[I_X, J]") is square
