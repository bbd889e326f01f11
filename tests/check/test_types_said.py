"""Types that a file says in words: in docstrings, comments and dicts of types. They are believed, and checked."""

import pytest
from test_rules_in_small import PARTIAL, WHOLE, found

OPAQUE = "def opaque(a):\n    'a[I, J_X] -> C[I, K] {U_X}, D[I_X, K].'\n    return fetch(a)\n\n"
CLASS = """
class Slots:
    def attend(self, Q):
        \"\"\"O[I_X, K] of Q[I_X, K].\"\"\"
        return fetch(Q)

class At(NamedTuple):
    slots: Slots
    mesh: object

"""


@pytest.mark.parametrize(
    ("returns", "rules"),
    [("w, u", []), ("u, u", ["result"]), ("w, w", ["result"]), ("[w, u]", []), ("fetch(a)", []), ("w, u, a", [])],
)
def test_several_results_of_a_docstring(returns, rules):
    body = "def f(a, b, mesh):\n    'a[I, J_X] -> C[I, K], C[I, K] {U_X}: more.'\n" + PARTIAL + WHOLE
    assert found(body + f"    return {returns}\n") == rules


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("return all_reduce(REDUCE, u, mesh)", []),
        ("return torch.relu(u)", ["nonlinear"]),
        ('return shard("D[I, K] -> D[I, K_X]", v, mesh)', ["split"]),
        ('return all_gather("D[I_X, K] -> D[I, K]", v, mesh)', []),
        ('return all_reduce(REDUCE, u, mesh, op="mean")', ["how-reduced"]),
    ],
)
def test_what_a_body_does_not_tell_its_docstring_does(line, rules):
    """A docstring without mesh axes is of whatever shards the function is given."""
    head = OPAQUE + "def f(a, mesh):\n    u, v = opaque(a)\n    "
    assert found(head + line) == rules
    assert found(head.replace("{U_X}", "").replace("_X", "") + line) == []


@pytest.mark.parametrize(
    ("value", "comment", "line", "rules"),
    [
        ("fetch()", "# u[I, K] {U_X}", "return torch.relu(u)", ["nonlinear"]),
        ("fetch()", "# u[I, K] {U_X}: parts", "return all_reduce(REDUCE, u, mesh)", []),
        ("torch.zeros(4)", "# u[I_X, K]", "return all_reduce(REDUCE, u, mesh)", ["split"]),
        ("fetch()", "# v[I, K] {U_X} is another's", "return torch.relu(u)", []),
        ("fetch()", "# see u[I, K] {U_X}", "return torch.relu(u)", []),
        ("fetch()", "# u[0] is the first", "return torch.relu(u)", []),
        ("shard('C[I, K] -> C[I_X, K]', a, mesh)", "# u[I_X, K]", "return u", []),
        ("shard('C[I, K] -> C[I_X, K]', a, mesh)", "# u[I, K]", "return u", ["split"]),
    ],
)
def test_a_comment_that_begins_with_the_type(value, comment, line, rules):
    assert found(f"def f(a, mesh):\n    u = {value}  {comment}\n    {line}\n") == rules


def test_fields_are_of_the_classes_that_they_name():
    text = CLASS + "def f(Q, at: At):\n    'Q[I_X, K] -> O[I, K].'\n    return "
    assert found(text + "at.slots.attend(Q)\n") == ["result"]
    assert found(text + 'all_gather("O[I_X, K] -> O[I, K]", at.slots.attend(Q), at.mesh)\n') == []


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("return tree.unshard({'W': W['W'], 'b': W['b']}, TYPES, mesh)", []),
        ("return tree.unshard({'W': W['W'], 'b': W['W']}, TYPES, mesh)", []),  # other dims: of a guess nothing is said
        (
            "u = torch.relu(shard('b[K] -> b[K_X]', W['b'], mesh))\nreturn tree.unshard({'b': u}, TYPES, mesh)",
            ["split"],
        ),
        ("return einsum('x[I_X, J] * W[J, K_X] -> C[I_X, K_X]', x, W['W'])", ["illegal-line"]),
        ("return einsum('x[I_X, J] * W[J, K] -> C[I_X, K]', x, W['W'])", ["split"]),
        ("return einsum('x[I, J] * W[J, K_X] -> C[I, K_X]', y, W['W'])", ["split"]),
    ],
)
def test_arrays_sharded_by_types_that_are_known(line, rules):
    head = "TYPES = {'W': 'W[J, K_X]', 'b': 'b[K]'}\ndef f(params, both, mesh):\n"
    head += "    W, (x, y) = tree.shard(params, TYPES, mesh), tree.shard(both, ['x[I_X, J]'] * 2, mesh)\n    "
    assert found(head + line.replace("\n", "\n    ")) == rules


def test_partial_sums_side_by_side_are_a_dim():
    """What is 1 {U_X} is, its parts side by side, a dim split over X."""
    text = "def f(part, mesh):\n    'part[1, K] {U_X} -> C[1, K].'\n    first, *others = "
    text += 'all_gather("part[G_X, K] -> part[G, K]", part, mesh)\n    return sum(others, first)[None]\n'
    assert found(text) == []
    assert found(text.replace("G_X", "G_Y")) == ["unreduced"]
    assert found(text.replace("part[1, K] {U_X}", "part[G, K] {U_X}")) == ["unreduced"]
    assert found(text.replace('all_gather("part[G_X, K] -> part[G, K]", part, mesh)', "part")) == ["result"]


def test_each_of_a_tuple_by_itself():
    """A comprehension over arrays of different types reads its function of each."""
    head = "def g(x):\n    return torch.relu(x)\n\ndef f(a, b, mesh):\n" + PARTIAL + WHOLE
    assert found(head + "    return [g(x) for x in (w, u)]\n") == ["nonlinear"]
    assert found(head + "    return [g(x) for x in (w, w)]\n") == []
