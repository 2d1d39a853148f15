"""What clusters are called, and the small table of rules that says who belongs to them (clusters.json).

A rule looks at where a node stands and what it does, never at a feature's number, so it holds for any transcoder:

    {"say small": {"positions": [8], "pushes": true}, "large": {"positions": [5], "layers": [0, 3]},
     "quotes": {"positions": [4, 6, 8]}, "mine": ["3_1021_5", "2_error_mlp_5"]}

positions, layers (lowest, highest), kinds (feature, error, token, position) and pushes (features that act on the
targets mostly by themselves) must all fit. A list names single nodes, of one transcoder and one prompt.
"""

import unicodedata
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ..runs.run import read_json, reading
from .graph import BIAS, KINDS, Graph

QUOTES = frozenset("\"'`“”‘’„‚«»‹›″′")
BRACKETS = frozenset("()[]{}<>⟨⟩（）［］｛｝「」『』【】")
RULE_KEYS = {"positions", "layers", "kinds", "pushes"}
_EXAMPLE = '{"large": {"positions": [5], "layers": [0, 3]}, "mine": ["3_1021_5", "2_error_mlp_5"]}'


# ---- names -----------------------------------------------------------------------------------------------------------


def node_name(graph: Graph, node: int) -> str:
    """A node's name that survives a new trace; also its id in exported graphs. Names of different nodes differ."""
    n = graph.node(node)
    if n.kind == "feature":
        return f"{n.layer}_{n.index}_{n.position}"
    if n.kind == "error":
        return f"{n.layer}_error_mlp_{n.position}"
    if n.kind in ("token", "position"):
        return f"{'E' if n.kind == 'token' else 'P'}_{n.index}_{n.position}"
    if n.kind == "bias":
        return f"{n.layer}_bias{n.index}"
    first = graph.n_nodes - len(graph.targets)
    # Differences and directions have no vocabulary id, and a token may be asked about twice.
    plain = n.index >= 0 and n.index not in graph.index[first:node].tolist()
    return f"{graph.n_layers + 1}_{n.index if plain else f'target{node - first}'}_{n.position}"


def mark_of(token: str) -> str | None:
    """The common name of marks: quotes, brackets, whitespace, or the punctuation itself; None for words."""
    mark = token.strip()
    if not mark:
        return "whitespace"
    if any(c.isalnum() for c in mark):
        return None
    if any(c in QUOTES for c in mark):
        return "quotes"
    if any(c in BRACKETS for c in mark):
        return "brackets"
    return mark if all(unicodedata.category(c).startswith("P") for c in mark) else None


def name_positions(tokens: Sequence[str]) -> list[str]:
    """The cluster of every position. Depends on the prompt alone."""
    marks = [mark_of(token) for token in tokens]
    words = [_printable(token.strip()) for token in tokens]
    count = Counter(word for word, mark in zip(words, marks, strict=True) if mark is None)
    taken = {mark for mark in marks if mark is not None}
    return [
        _printable(mark) if mark is not None else word if count[word] == 1 and word not in taken else f"{word} @{i}"
        for i, (word, mark) in enumerate(zip(words, marks, strict=True))
    ]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# ---- rules -----------------------------------------------------------------------------------------------------------


def rules_of(graph: Graph) -> dict[str, Any]:
    """The automatic rules of a graph, as clusters.json has them: the first rule that fits a node takes it."""
    names = name_positions(graph.tokens)
    answer = int(graph.position[-1])
    rules: dict[str, Any] = {free_name(f"say {label_of(graph, 0)}", names): {"positions": [answer], "pushes": True}}
    for position, name in enumerate(names):
        rules.setdefault(name, {"positions": []})["positions"].append(position)
    return rules


def label_of(graph: Graph, target: int) -> str:
    """What a target is called."""
    return _printable(str(graph.targets[target]["label"]).strip()) or repr(graph.targets[target]["label"])


def free_name(name: str, taken: Container[str]) -> str:
    """The name, or one like it that is not taken."""
    while name in taken:
        name += " (output)"
    return name


def read_rules(path: str | Path) -> dict[str, Any]:
    """Rules from a clusters.json; ValueError for anything that is not a name -> ids or rule table."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file {path}: expected clusters as JSON, name -> list of node ids or rule")
    try:
        rules: dict[str, Any] = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error.__cause__}") from None
    with reading(path):
        check_rules(rules, str(path))
    return rules


def check_rules(rules: Any, where: str = "clusters") -> None:
    """ValueError for rules that no graph could follow."""
    if not isinstance(rules, dict) or not rules:
        raise ValueError(f"{where}: expected an object, name -> list of node ids or rule, such as {_EXAMPLE}")
    for name, rule in rules.items():
        problem = _wrong_ids(name, rule) if isinstance(rule, list) else _wrong_rule(name, rule)
        if problem:
            raise ValueError(f"{where}: {problem}")


def _wrong_ids(name: str, nodes: list[Any]) -> str | None:
    wrong = [node for node in nodes if not isinstance(node, str)]
    listed = f"{name!r} lists {wrong[:3] or 'nothing'}; expected node ids: {_EXAMPLE}"
    return listed if wrong or not nodes else None


def _wrong_rule(name: str, rule: Any) -> str | None:
    if not isinstance(rule, dict) or not rule or not set(rule) <= RULE_KEYS:
        return f"{name!r} is {rule!r}; expected node ids, or some of {sorted(RULE_KEYS)}"
    for key in ("positions", "layers"):
        value = rule.get(key, [0, 0])
        whole = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not whole or (key == "layers" and len(value) != 2):
            return f"{key} of {name!r} is {value!r}; expected whole numbers (layers: two)"
    kinds = rule.get("kinds", [])
    if not isinstance(kinds, list) or not set(kinds) <= set(KINDS[:BIAS]):
        return f"kinds of {name!r} is {kinds!r}; expected some of {list(KINDS[:BIAS])}"
    if not isinstance(rule.get("pushes", True), bool):
        return f"pushes of {name!r} is {rule['pushes']!r}; expected true or false"
    return None
