"""The one-token mutants of a source file: an operator, a comparison, a number, min for max. For mutants.py."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.And: "and", ast.Or: "or"}
OPERATORS |= {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
PAIRS = [("+", "-"), ("*", "/"), ("<", "<="), (">", ">="), ("==", "!="), ("and", "or"), ("+=", "-="), ("*=", "/=")]
PAIRS += [("min", "max"), ("any", "all"), ("amin", "amax"), ("minimum", "maximum"), ("**", "*")]
SWAPS = {b: a for a, b in PAIRS} | dict(PAIRS) | {"*": "/"}
TOLERANCE = 1e-5  # smaller numbers keep rounding and division by nothing out; their digits mean nothing
# Messages, names and types: no number comes of them.
SKIPPED = (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise)


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str  # the line, without its indentation
    after: str
    text: str  # the whole file
    lines: tuple[int, int]  # a test that runs one of these (first, last) runs the mutant
    name: str | None  # or, for what runs on import: a test that runs a line with this name


def nudged(number: str) -> str:
    """The last digit one higher: 1 -> 2, 0.5 -> 0.6, 1e-6 -> 2e-6."""
    value = Decimal(number.replace("_", ""))
    return str(value + Decimal((0, (1,), int(value.as_tuple().exponent)))).replace("E+", "e").replace("E", "e")


class Finder:
    def __init__(self, text: str):
        self.source = text.splitlines(keepends=True)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.tokens = {t.start: t for t in tokens if t.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER)}
        self.found: list[tuple[tokenize.TokenInfo, str, tuple[int, int], str | None]] = []
        self.lines, self.name = (1, len(self.source)), None
        self.visit(ast.parse(text))

    def place(self, node: ast.AST, end: bool = False) -> tuple[int, int]:
        """Where a node begins or ends; ast counts bytes, tokenize characters."""
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        return line, len(self.source[line - 1].encode()[:column].decode())

    def add(self, token: tokenize.TokenInfo, new: str) -> None:
        self.found.append((token, new, self.lines, self.name))

    def between(self, left: ast.AST, right: ast.AST, symbol: str) -> None:
        """Swap the operator that stands between two nodes."""
        begin, end = self.place(left, end=True), self.place(right)
        (token,) = (t for at, t in self.tokens.items() if begin <= at < end and t.string == symbol)
        if symbol in SWAPS:
            self.add(token, SWAPS[symbol])

    def visit(self, node: ast.AST, inside: bool = False) -> None:
        if isinstance(node, SKIPPED):
            return
        before = self.lines, self.name
        if isinstance(node, ast.stmt):
            self.enter(node, inside)
        self.mutate(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "msg"):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self.visit(part, inside or (isinstance(node, ast.FunctionDef) and field == "body"))
        self.lines, self.name = before

    def enter(self, node: ast.stmt, inside: bool) -> None:
        """Which lines run when the mutants of this statement do."""
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef):  # its defaults count when it runs
            self.lines, self.name = (body[0].lineno, node.end_lineno), None
        elif inside:
            self.lines, self.name = (
                (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno),
                None,
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            self.name = ast.unparse(target).split(",")[0].strip("(")

    def mutate(self, node: ast.AST) -> None:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            self.between(node.left, node.right, OPERATORS[type(node.op)])
        elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            self.between(node.target, node.value, OPERATORS[type(node.op)] + "=")
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                self.between(left, right, OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare):
            numbers = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            exact = not any(isinstance(value, float) and 0 < value <= TOLERANCE for value in numbers)
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                # Beside a tolerance it means nothing on which side the very edge is.
                if type(op) in OPERATORS and (exact or isinstance(op, ast.Eq | ast.NotEq)):
                    self.between(left, right, OPERATORS[type(op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self.add(self.tokens[self.place(node)], "")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            token = self.tokens[self.place(node)]
            if (node.value == 0 or node.value > TOLERANCE) and not token.string.startswith("0x"):
                self.add(token, nudged(token.string))
        elif isinstance(node, ast.Name | ast.Attribute | ast.keyword):
            word = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None) or node.arg
            line, column = self.place(node, end=True)
            at = (line, column - len(word)) if isinstance(node, ast.Attribute) else self.place(node)
            if word in SWAPS:
                self.add(self.tokens[at], SWAPS[word])


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Every one-token mutant of this text, in no particular order."""
    finder = Finder(text)
    for token, new, lines, name in finder.found:
        (line, begin), (_, end) = token.start, token.end
        old = finder.source[line - 1]
        changed = old[:begin] + new + old[end:]
        whole = "".join([*finder.source[: line - 1], changed, *finder.source[line:]])
        yield Mutant(file, line, old.strip(), changed.strip(), whole, lines, name)


def reach(mutant: Mutant, texts: dict[str, str]) -> set[tuple[str, int]]:
    """(file, line) of everything that shows a test to run this mutant."""
    if mutant.name is not None:
        word = re.compile(rf"\b{re.escape(mutant.name)}\b")
        return {(f, i) for f, text in texts.items() for i, line in enumerate(text.splitlines(), 1) if word.search(line)}
    return {(mutant.file, line) for line in range(mutant.lines[0], mutant.lines[1] + 1)}
