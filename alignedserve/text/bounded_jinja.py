"""A sandbox for templates of strangers: it changes nothing, and ends in bounded time and memory.

Jinja2's own sandbox keeps a template from the process, but not from its time: loops within loops, macros that call
themselves twice, or `9**9**9` hold a thread for ever. Here every step of a loop and every call looks at the time that
the thread has computed, and what operators make is bounded before they make it.
"""

import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from typing_extensions import override

MAX_LENGTH = 100_000_000  # of a text or list that a template makes
_MAX_POWER_BITS = 10_000
_ends_s: ContextVar[float] = ContextVar("the time of its thread at which a rendering ends")


@contextmanager
def within_s(limit_s: float) -> Iterator[None]:
    """Refuse templates that compute for longer than `limit_s`, waits not counted, with jinja2.TemplateError."""
    token = _ends_s.set(time.thread_time() + limit_s)
    try:
        yield
    finally:
        _ends_s.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that stop when the time given by `within_s` is over."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.step = object()  # what the steps of loops call
        self.binop_table |= {"+": _sum, "*": _product, "**": _power}

    @override
    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Watched().visit(source), *args, **kwargs)

    @override
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in jinja2)
        if time.thread_time() > _ends_s.get():
            raise jinja2.TemplateRuntimeError("it takes too long to render")
        return True if __obj is __self.step else super().call(__context, __obj, *args, **kwargs)

    def joined(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        check_length(sum(map(len, texts)))
        return "".join(texts)


class _Watched(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (jinja2 finds it by this name)
        self.generic_visit(node)
        step = _call("step", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def check_length(length: int) -> None:
    """Raise MemoryError, as a machine would, where a template makes more than MAX_LENGTH."""
    if length > MAX_LENGTH:
        raise MemoryError


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), arguments, [], None, None, lineno=line)


def _sum(left: Any, right: Any) -> Any:
    check_length(_length(left) + _length(right))
    return left + right


def _product(left: Any, right: Any) -> Any:
    for sequence, factor in ((left, right), (right, left)):
        if isinstance(factor, int):
            check_length(_length(sequence) * factor)
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
        raise jinja2.TemplateRuntimeError("it makes a number that is too large")
    return operator.pow(left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0
