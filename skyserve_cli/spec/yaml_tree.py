"""YAML text -> a tree of plain values, for a reader who must survive any text.

PyYAML parses; the values are built here, because a service file wants more than the safe loader gives:

- a key written twice is an error that names both lines (the loader keeps the last one, silently);
- keys are always text (``on:`` is not ``True``), and so are the values of `envs` and `secrets`: an environment
  variable is what was written, ``0080`` and ``yes`` included;
- dates stay text; tags that build objects are refused;
- size, depth and the number of values after aliases are expanded are bounded.
"""

from collections.abc import Iterator, Mapping

import yaml

from skyserve_cli.spec.json_text import LARGEST, MAX_BYTES, UNUSABLE
from skyserve_cli.spec.problems import Loc, Problem, SpecError, dotted, shown

Tree = None | bool | int | float | str | list["Tree"] | dict[str, "Tree"]

MAX_VALUES = 10_000
MAX_DEPTH = 50

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_TEXT_SECTIONS = ("envs", "secrets")
#: Sections inside of others whose values are text: headers of the probe, labels of machines.
_TEXTS = ("headers", "labels")
#: Where numbers have a meaning here.
_OURS = (("service",), ("resources",), ("num_nodes",))


class _Loader(yaml.SafeLoader):
    """Scans, parses and composes; its constructor is used for single scalars only."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(text: str, loc: Loc = ()) -> tuple[Tree, list[Problem]]:
    """Return the tree and the problems that do not keep us from looking further (duplicate keys, the last one wins).

    `loc` is where the text stands in a service file. Raises SpecError when there is no tree to look at: not YAML, several documents, too large, too deep.
    """
    if len(text) > MAX_BYTES:
        raise SpecError([Problem("", f"larger than {MAX_BYTES >> 10} KiB, which no service file is")])
    # The loader reads the text already here, so that unprintable characters are reported like bad syntax.
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise SpecError([_syntax_problem(error, text)]) from error
    except RecursionError as error:
        raise SpecError([Problem("", f"nested more than {MAX_DEPTH} levels deep")]) from error
    except (ValueError, OverflowError) as error:  # PyYAML passes "\UFFFFFFFF" to chr()
        raise SpecError([Problem("", f"not valid YAML: {error}")]) from error
    if root is None:
        return None, []
    builder = _Builder(loader)
    return builder.build(root, loc), builder.problems


def read_value(text: str, loc: Loc) -> Tree:
    """Return one value given on the command line, read as the file would be read at `loc`. Raises SpecError."""
    if loc[:1] in {(section,) for section in _TEXT_SECTIONS} and len(loc) == 2:
        return text
    tree, problems = read_yaml(text, loc)
    if problems:
        raise SpecError(problems)
    return tree


def key_lines(text: str) -> dict[str, int]:
    """Return the line of every key and list item of the text, by its dotted path. Empty where the text is not YAML."""
    try:
        root = _Loader(text).get_single_node()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
        return {}
    lines: dict[str, int] = {}
    waiting: list[tuple[yaml.Node | None, Loc]] = [(root, ())]
    while waiting and len(lines) < MAX_VALUES:  # aliases can name the same node very often
        node, loc = waiting.pop()
        if len(loc) > MAX_DEPTH:
            continue
        steps: list[tuple[str | int, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            steps = [
                (str(key.value), key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)
            ]
        elif isinstance(node, yaml.SequenceNode):
            steps = [(index, item, item) for index, item in enumerate(node.value)]
        for step, where, value in steps:
            lines.setdefault(dotted((*loc, step)), where.start_mark.line + 1)
            waiting.append((value, (*loc, step)))
    return lines


def line_of(path: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of a path, or of what encloses it where the file does not have it; None for the whole file."""
    enclosing = [key for key in lines if path == key or path.startswith((f"{key}.", f"{key}["))]
    return lines[max(enclosing, key=len)] if enclosing else None


class _Builder:
    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.problems: list[Problem] = []
        self._loader = loader
        self._values = 0

    def build(self, node: yaml.Node, loc: Loc) -> Tree:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _at(node, loc, f"more than {MAX_VALUES} values, counting each use of an alias")
        if len(loc) > MAX_DEPTH:
            raise _at(node, loc[:3], f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(child, (*loc, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loc)
        raise _at(node, loc, f"the tag {shown(node.tag)} is not allowed here")

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Tree]:
        merged: dict[str, Tree] = {}
        own: dict[str, Tree] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                for inherited in self._inherited(value_node, loc):
                    merged = {**inherited, **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _at(key_node, loc, "a key must be a word, not a list or a mapping")
            key = _usable(key_node, loc)
            line = key_node.start_mark.line + 1
            if key in own:
                lines = f"lines {first_line[key]} and {line}"
                self.problems.append(Problem(dotted((*loc, key)), f"appears twice ({lines})"))
            first_line.setdefault(key, line)
            own[key] = self.build(value_node, (*loc, key))
        return {**merged, **own}

    def _inherited(self, node: yaml.Node, loc: Loc) -> Iterator[dict[str, Tree]]:
        """Yield what ``<<: *anchor`` or ``<<: [*one, *other]`` brings in; earlier ones win."""
        many = isinstance(node, yaml.SequenceNode)
        for source in node.value if many else [node]:
            built = self.build(source, (*loc, "<<"))
            if not isinstance(built, dict):
                raise _at(node, loc, "`<<` takes a mapping or a list of mappings")
            yield built

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> Tree:
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        text = _usable(node, loc)
        if kind == "str" or _is_text(loc):
            return text
        try:
            ours = (
                loc[:1] in _OURS
            )  # what SkyPilot passes on, such as the mode of a file in a Pod, may be octal
            if kind in ("int", "float") and ours and (meant := _not_as_written(text)):
                self.problems.append(
                    Problem(dotted(loc), f"{shown(text)} is {meant}; write the number itself")
                )
            if kind == "bool":
                return bool(self._loader.construct_yaml_bool(node))
            if kind == "int":
                number = int(self._loader.construct_yaml_int(node))
                if abs(number) <= LARGEST:
                    return number
                raise OverflowError
            if kind == "float":
                return float(self._loader.construct_yaml_float(node))
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise _at(node, loc, f"{shown(text)} cannot be read as a YAML {kind}") from error
        if kind in ("value", "merge"):  # a bare "=" or "<<" that stands for itself
            return text
        raise _at(node, loc, f"the tag {shown(node.tag)} is not allowed here")


def _is_text(loc: Loc) -> bool:
    """Return whether the value there is what was written: a variable, a header or a label, also of a mapping merged by ``<<``."""
    place = tuple(part for part in loc if part != "<<")
    if len(place) == 2:
        return place[0] in _TEXT_SECTIONS
    return len(place) > 2 and place[-2] in _TEXTS and place[0] in ("service", "resources")


def _not_as_written(text: str) -> str | None:
    """Return what YAML 1.1 makes of a number that few people read so, or None."""
    digits = text.lstrip("+-").replace("_", "")
    if ":" in digits:
        return "a number of base 60 in YAML 1.1"
    if digits.isdigit() and len(digits) > 1 and digits.startswith("0") and digits.strip("0"):
        return f"the octal number {int(digits, 8)} in YAML 1.1"
    return None


def _usable(node: yaml.ScalarNode, loc: Loc) -> str:
    text = str(node.value)
    if UNUSABLE.search(text):
        raise _at(node, loc, "holds a character that cannot be passed on (NUL or half a surrogate pair)")
    return text


def _at(node: yaml.Node, loc: Loc, message: str) -> SpecError:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    return SpecError([Problem(dotted(loc), f"{message} (line {line}, column {column})")])


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    hint = None
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what = f"the character {text[error.position : error.position + 1]!a} is not allowed"
    elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, column = error.problem_mark.line + 1, error.problem_mark.column + 1
        what = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in what:
            hint = "indent with spaces, not with tabs"
        elif error.context == "expected a single document in the stream":
            hint = "one file describes one service"
    else:
        return Problem("", f"not valid YAML: {error}")
    return Problem("", f"not valid YAML, line {line}, column {column}: {what}", hint=hint)
