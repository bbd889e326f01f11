"""The laws of arrays with scales: what products, collectives and quantize may do to them (notation.md).

They follow from two facts. A scale belongs to all values that share it, so a line that moves an array moves both. And
values with different scales cannot be added, so a product takes the scales out of its sum, and any other sum is of
dequantized values.
"""

from scaling.spec import Format, Line, Spec, parse, parse_line, refuse


def check_scales(line: Line) -> Line:
    """Return the line; refuse a product whose scales cannot be taken out of its sum, or whose result has scales."""
    for spec in line.operands:
        for dim in spec.dim_names if spec.scaled else ():
            if dim not in spec.scaled and dim not in line.result.dim_names:
                refuse(f"einsum: {line}", f"{spec} has a scale for each place of {dim}, which is summed over",
                        "scales are taken out of the sum: every summed dim is in {Q_...} of each scaled operand",
                        f"quantize it again from the master copy, along {dim}: scales along one dim do not follow from "
                        "those along another")  # fmt: skip
    if line.result.scaled:
        what, rule = f"the result {line.result} has scales", "a product is accumulated in float32, without scales"
        refuse(f"einsum: {line}", what, rule, "write the result without {Q}, and quantize it by a line of its own")
    return line


def check_quantize(line: "str | Line", back: bool = False) -> Line:
    """Return the parsed line of a quantize, `W[D_X, F] -> W[D_X, F] {Q_D}`, or with `back` of a dequantize."""
    line, what = parse_line(line), "dequantize" if back else "quantize"
    before, after = line.operands[0], line.result
    wide, scaled = (after, before) if back else (before, after)
    if before.unreduced or after.unreduced:
        refuse(f"{what}: {line}", f"{before} is a partial sum" if before.unreduced else f"{after} is a partial sum",
               "a sum is not quantized: terms with scales of their own cannot be added",
               "reduce it first; or all_to_all its quantized terms, dequantize and add them")  # fmt: skip
    if len(line.operands) > 1 or before.dims != after.dims or wide.scaled or not scaled.scaled:
        refuse(f"{what}: {line}", "more than {Q} changes, or it does not",
               "W[D_X, F] -> W[D_X, F] {Q_D} changes how an array is held, not where its elements are",
               "write the same dims and axes on both sides, {Q_...} on one")  # fmt: skip
    return line


def parse_plain(text: "str | Spec") -> Spec:
    """Return the parsed type; refuse one with scales, whose parts a plan would have to move each by its own steps."""
    spec = parse(text)
    if spec.scaled:
        refuse(spec, "its array has scales", "plans and derived programs are of plain arrays",
               f"write its lines, or plan the parts: parse({str(spec)!r}).parts(format)")  # fmt: skip
    return spec


def lines_of_parts(kind: str, line: str, format: "str | Format") -> list[tuple[str, str]]:
    """Return (kind, line) of a collective for each part of an array with scales; ("", "") for one that stays.

    A part that lacks a dim is whole along it: an AllToAll then gathers it, or takes each rank's slice.
    """
    parsed, found = parse_line(line), []
    for was, now in zip(parsed.operands[0].parts(format), parsed.result.parts(format), strict=True):
        lost, gained = {*was.axes} - {*now.axes}, {*now.axes} - {*was.axes}
        own = "AllGather" if lost and not gained else "Slice" if gained and not lost else kind
        stays = was.dims == now.dims and kind != "CollectivePermute"
        found.append(("", "") if stays else (own, f"{was} -> {now}"))
    return found
