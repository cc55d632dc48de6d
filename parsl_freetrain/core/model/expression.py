"""Formulas that users state as objectives: parsed, never executed as Python. Allowed are numbers
(all floats), fields, ``+ - * / **``, comparisons (1 if true, else 0), ``a if condition else b``,
and ``min``, ``max``, ``sqrt`` and ``log``.
"""

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from parsl_freetrain.core.model.errors import BadInput

MOST_CHARACTERS = 1000
MOST_DEPTH = 50

Fields = Mapping[str, float]
Formula = Callable[[Fields], float]

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    # math.pow refuses what ** answers with a complex number
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# By name: the function, and the fewest and most arguments.
FUNCTIONS: dict[str, tuple[Callable[..., float], int, int]] = {
    'min': (min, 2, 20),
    'max': (max, 2, 20),
    'sqrt': (math.sqrt, 1, 1),
    'log': (math.log, 1, 1),
}


@dataclass(frozen=True)
class Expression:
    """A formula that was read and found good, and the fields that it uses."""

    text: str
    uses: frozenset[str]
    _formula: Formula = field(repr=False, compare=False)

    def value(self, fields: Fields) -> float:
        """Its value; ArithmeticError or ValueError if it has none (1 / 0, log of 0, too large)."""
        return float(self._formula(fields))


def parse(text: str, fields: Collection[str]) -> Expression:
    """Read a formula over ``fields``; raises BadInput with the column (from 1) of what is wrong."""
    if len(text) > MOST_CHARACTERS:
        raise BadInput(f'The expression has {len(text)} characters; the most is {MOST_CHARACTERS}.')
    reader = _Reader(text, fields)
    try:
        tree = ast.parse(text.strip(), mode='eval')
    except SyntaxError as error:
        reader.refuse(f'{error.msg}', error.offset or 1)
    except (ValueError, RecursionError, MemoryError):
        reader.refuse('it cannot be read', 1)
    formula = reader.formula(tree.body, 0)
    return Expression(text, frozenset(reader.used), formula)


class _Reader:
    def __init__(self, text: str, fields: Collection[str]) -> None:
        self._text, self._fields = text, fields
        self._indent = len(text) - len(text.lstrip())
        self.used: set[str] = set()

    def refuse(self, what: str, column: int) -> NoReturn:
        """Column from 1, in the text without leading blanks."""
        raise BadInput(
            f'The expression {self._text!r} cannot be used because of column '
            f'{self._indent + column}: {what}; it may have numbers, + - * / **, comparisons, '
            f'if-else, min, max, sqrt, log, and the fields {", ".join(self._fields)}.'
        )

    def formula(self, node: ast.expr, depth: int) -> Formula:
        if depth > MOST_DEPTH:
            self._refuse_node('it is nested too deeply', node)
        inner = depth + 1
        match node:
            case ast.Constant(value=value):
                return self._number(node, value)
            case ast.Name(id=name):
                return self._field(node, name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                negated = self.formula(operand, inner)
                return lambda f: -negated(f)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.formula(operand, inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                a, b = self.formula(left, inner), self.formula(right, inner)
                apply = OPERATORS[type(op)]
                return lambda f: apply(a(f), b(f))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in COMPARISONS for op in ops
            ):
                parts = [self.formula(part, inner) for part in (left, *others)]
                return self._comparison(parts, [COMPARISONS[type(op)] for op in ops])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition, then, otherwise = (
                    self.formula(part, inner) for part in (test, body, orelse)
                )
                return lambda f: then(f) if condition(f) else otherwise(f)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return self._call(node, name, [self.formula(arg, inner) for arg in args])
        part = ast.get_source_segment(self._text.strip(), node)
        self._refuse_node(f'{part or "this"} is not allowed', node)

    def _number(self, node: ast.expr, value: object) -> Formula:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse_node(f'{value!r} is not a number', node)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self._refuse_node('the number is too large', node)
        return lambda f: number

    def _field(self, node: ast.expr, name: str) -> Formula:
        if name not in self._fields:
            self._refuse_node(f'there is no field {name!r}', node)
        self.used.add(name)
        return lambda f: f[name]

    @staticmethod
    def _comparison(parts: list[Formula], compare: list[Callable[[float, float], bool]]) -> Formula:
        def holds(f: Fields) -> float:
            values = [part(f) for part in parts]
            return float(all(c(a, b) for c, a, b in zip(compare, values, values[1:], strict=False)))

        return holds

    def _call(self, node: ast.expr, name: str, arguments: list[Formula]) -> Formula:
        function, fewest, most = FUNCTIONS[name]
        if not fewest <= len(arguments) <= most:
            takes = f'{fewest} argument' if fewest == most else f'{fewest} to {most} arguments'
            self._refuse_node(f'{name} takes {takes} and got {len(arguments)}', node)
        return lambda f: function(*(argument(f) for argument in arguments))

    def _refuse_node(self, what: str, node: ast.expr) -> NoReturn:
        before = self._text.strip().encode()[: node.col_offset] if node.lineno == 1 else b''
        self.refuse(what, len(before.decode(errors='replace')) + 1)
