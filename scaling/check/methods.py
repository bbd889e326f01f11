"""Methods of values, read and not run (see scaling.check): of arrays, dicts, lists and texts."""

import ast
from dataclasses import replace

from scaling.check.part import Part
from scaling.check.torch_names import names
from scaling.check.values import Each, Many, Number, Record, Shard, Text, Var, element, merge, together

TEXT_METHODS = names("replace strip lower upper removeprefix removesuffix format split")


class Methods(Part):
    """The part of the reader that reads methods of values."""

    def method(self, fn: ast.Attribute, node: ast.Call, args: list, keywords: dict, frame):
        held = self.known(self.holders.get(id(fn)))
        match held:
            case Shard() | Number():
                return self.of_array(held, fn, node, args, keywords, frame)
            case Var():
                return held if fn.attr == "wait" else self.of_torch(fn.attr, node, [held, *args], keywords, frame)
            case Text():
                return text_method(held, fn.attr, args)
            case Record():
                return self.of_dict(held, fn, node, args, frame)
            case Many() | Each():
                return self.of_list(held, fn, node, args, frame)
        if fn.attr == "copy_" and args:
            self.stored(node, fn.value, args[0], frame)
        return self.unfollowed(node, [*args, *keywords.values()], frame)

    def of_array(self, held: "Shard | Number", fn: ast.Attribute, node: ast.Call, args, keywords, frame):
        name = fn.attr
        if isinstance(held, Shard) and name == "wait":
            return replace(held, pending=False)
        if name == "copy_" and args:
            self.stored(node, fn.value, args[0], frame)
            if isinstance(fn.value, ast.Name):
                frame.env[fn.value.id] = args[0]
            return args[0]
        if isinstance(held, Shard) and name == "backward":
            self.differentiated(node, held, frame)
            return None
        found = self.of_torch(name, node, [held, *args], keywords, frame)
        if name.endswith("_") and isinstance(fn.value, ast.Name) and isinstance(found, Shard):
            frame.env[fn.value.id] = found
        return found

    def of_dict(self, held: Record, fn: ast.Attribute, node: ast.Call, args, frame):
        name, values = fn.attr, Many(tuple(item for _, item in held.items))
        rows = Many(tuple(Many((Text(key), item)) for key, item in held.items))
        if name in ("items", "values"):
            return rows if name == "items" else values
        if name in ("get", "pop", "setdefault") and args and isinstance(args[0], Text):
            found = held.get(args[0].text)
            return found if found is not None or len(args) < 2 else args[1]
        if name == "update" and isinstance(fn.value, ast.Name):
            given = [*args, Record(tuple((k.arg, self.value(k.value, frame)) for k in node.keywords if k.arg))]
            added = {key: item for each in given if isinstance(each, Record) for key, item in each.items}
            frame.env[fn.value.id] = replace(held, items=tuple((dict(held.items) | added).items()))
        if name == "_replace":
            changed = {k.arg: self.value(k.value, frame) for k in node.keywords if k.arg}
            return replace(held, items=tuple((dict(held.items) | changed).items()))
        return held if name in ("copy", "_asdict") else None

    def of_list(self, held, fn: ast.Attribute, node: ast.Call, args, frame):
        name = fn.attr
        if name in ("append", "insert", "add") and args and isinstance(fn.value, ast.Name):
            if isinstance(held, Many) and frame.straight and name == "append":
                frame.env[fn.value.id] = Many((*held.items, args[0]))
            else:
                before = element(held)
                frame.env[fn.value.id] = Each(merge(before, args[-1]))
            return None
        if name == "extend" and args and isinstance(fn.value, ast.Name):
            frame.env[fn.value.id] = together(held, args[0])
            return None
        if name == "pop":
            return element(held)
        return held if name in ("copy",) else None


def text_method(held: Text, name: str, args: list):
    """str.replace, format and the like, of texts that are known."""
    texts = [a.text for a in args if isinstance(a, Text)]
    if len(texts) < len(args) or name not in TEXT_METHODS:
        return None
    try:
        found = getattr(held.text, name)(*texts)
    except (IndexError, KeyError, ValueError, TypeError):
        return None
    return Text(found) if isinstance(found, str) else Many(tuple(map(Text, found)))
