"""A sandbox of jinja2 for chat templates, with the helpers of transformers.

The template comes with the model, never with a request; still it is not trusted: it cannot reach
attributes of Python objects, and the iterations of its loops, the size of its products and the
length of its output are bounded, whatever messages it is given.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_ITERATIONS = 1_000_000  # of all loops, and calls, of one rendering together
MAX_PRODUCT = 2**20  # characters or entries
# a width, in what % formats, of 10,000 or of an argument
WIDE = re.compile(r"%[^a-zA-Z%]*([0-9]{5}|\*)")


class Budget:
    """Budget of a rendering. limit: characters of any one text. iterations: of loops, and calls;
    left: those that may still come."""

    def __init__(self, limit: int, iterations: int = MAX_ITERATIONS) -> None:
        self.left = self.iterations = iterations
        self.limit = limit

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise jinja2.TemplateError(
                f"its loops and calls take more than {self.iterations} iterations"
            )

    def sized(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.limit:
            raise jinja2.TemplateError(f"it makes a text of more than {self.limit} characters")
        return value


class _Bounding(NodeTransformer):
    """Makes every `for` of a template count its iterations, and every `~` check the size of its
    result."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(node, "sized", [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here its body is just
    rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters.update(
            tojson=_tojson,
            bounded=_bounded,
            sized=pass_context(lambda context, value: _budget(context).sized(value)),
        )
        self.globals.update(
            raise_exception=_raise, strftime_now=lambda form: datetime.datetime.now().strftime(form)
        )

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether a template may reach an attribute: also what makes a list longer or
        shorter by one entry, as Kimi K2's templates do."""
        if type(obj) is list and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounding().visit(super()._parse(source, name, filename))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        large = operator == "*" and _product_size(left, right) > MAX_PRODUCT
        if (
            operator == "**"
            or large
            or (operator == "%" and isinstance(left, str) and WIDE.search(left))
        ):
            raise jinja2.TemplateError(f"it computes {operator!r} of values that are too large")
        return _budget(context).sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **rest: Any) -> Any:
        budget = _budget(__context)
        budget.spend()
        # as of ljust
        if any(isinstance(value, int) and abs(value) > MAX_PRODUCT for value in arguments):
            raise jinja2.TemplateError("it calls a function with a number that is too large")
        return budget.sized(super().call(__context, __obj, *arguments, **rest))


def _product_size(left: Any, right: Any) -> int:
    """Length of a text or list times a number, in either order; 0 for other products."""
    return _extent(left) * _extent(right)


def _extent(value: Any) -> int:
    if isinstance(value, (str, list, tuple)):
        return len(value)
    return abs(value) if isinstance(value, int) else 0


@pass_context
def _bounded(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for item in items:
        budget.spend()
        yield item


def _budget(context: jinja2.runtime.Context) -> Budget:
    budget = context.resolve("iterations_left")
    if not isinstance(budget, Budget):
        raise jinja2.TemplateError("it sets iterations_left, which is not its own")
    return budget


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_entries,
    )


def _entries(value: Any) -> list[Any]:
    """The entries of what filters such as `map` give. Errors: TypeError for other values."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
