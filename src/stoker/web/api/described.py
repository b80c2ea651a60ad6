"""The structs of other rooms as models that OpenAPI is made of: one description, kept where the struct is.

Answers are encoded from the structs themselves; the models are only what they are described by.
"""

import ast
import functools
import inspect
import itertools
import textwrap
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, Field, create_model

from stoker.queue.fields import JobField


@functools.cache
def described(struct: type[msgspec.Struct]) -> type[BaseModel]:
    """A model with the same fields, all of which are always there, and with what the struct says of them."""
    words = _words(struct)
    fields: dict[str, Any] = {}
    for name, hint in get_type_hints(struct, include_extras=True).items():
        if name in struct.__struct_fields__:
            stated = next((meta.help for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, JobField)), None)
            fields[name] = (_model_type(hint), Field(description=stated or words.get(name)))
    model: type[BaseModel] = create_model(struct.__name__, __doc__=inspect.getdoc(struct), **fields)
    return model


def _model_type(hint: Any) -> Any:
    """The same type with models in the place of structs."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return described(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _model_type(arguments[0])
    if not arguments or origin is Literal:
        return hint
    inner = tuple(argument if argument is Ellipsis else _model_type(argument) for argument in arguments)
    return Union[inner] if origin in {Union, types.UnionType} else origin[inner]  # noqa: UP007 - made while it runs


def _words(struct: type) -> dict[str, str]:
    """What stands below each field, of the struct and of those that it extends."""
    words: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if kind is not msgspec.Struct and isinstance(kind, type(msgspec.Struct)):
            words |= _words_in(kind)
    return words


def _words_in(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}  # it was installed without its source: then there are no words
    (body,) = ast.parse(source).body
    words = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in itertools.pairwise(statements):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            words[field.target.id] = str(ast.literal_eval(below.value))
    return words
