"""The rules that the judge knows, by name, and what it says when one is broken (docs/rules.md shows each)."""

RULES = {
    "illegal-line": "a line obeys the notation by itself, whatever its operands are",
    "dims": "an operand has the dims that its type says, in their order",
    "split": "only a collective changes how an array is split",
    "unreduced": "a partial sum stays {U} until it is reduced",
    "reduced-twice": "what is reduced already is not reduced again",
    "partial-plus-whole": "to a partial sum only partial sums over the same axes are added",
    "nonlinear": "a nonlinear function of partial sums is not the sum of the function's parts",
    "product-of-sums": "a product of two partial sums is not the sum of the products",
    "how-reduced": "the parts are put together the way they were made: parts of a sum are added",
    "never-waited": "what async_op=True or defer=True returns is waited for",
    "discarded": "a collective changes nothing in place: what it returns is used",
    "untyped": "what has typed lines moves data by them alone: a raw collective has the gradient of the identity",
    "pending": "what is still under way is waited for before it is used",
    "wrong-name": "a param goes into a line under its own name",
    "result": "a strategy's functions return what SPECS says",
    "loss": "a loss is differentiated while it is unreduced, each device's own terms; its value is reduced afterwards",
    "specs": "SPECS is a dict of types",
    "ignore": "a comment that silences a finding names the rule: # scaling: ignore[rule]",
    "python": "what is judged is Python",
}


def said(what: str, rule: str, fix: str = "", detail: str = "") -> str:
    """The text of a finding: what is wrong, the rule (or its `detail` here) and the fix."""
    return f"{what}\n  rule: {detail or RULES[rule]}" + (f"\n  fix: {fix}" if fix else "")
