"""Frozen dataclasses as JSON: encoded, and decoded with a check of every field.

What does not encode a value leads to an error of any type: decode in
`regular_files.decoding`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_origin

from mlx_marlin.regular_files import quoted

Forms = Mapping[Any, Callable[[dict[str, Any]], dict[str, Any]]]
"""By a dataclass, what makes its fields of an object that has others."""
NO_FORMS: Forms = MappingProxyType({})


def encoded(value: Any) -> Any:
    """Returns a dataclass as a dict of its init fields, a tuple as a list."""
    if isinstance(value, tuple):
        return [*map(encoded, value)]
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value) if field.init]
    return {name: encoded(getattr(value, name)) for name in names}


def decoded(type_: Any, data: Any, where: str = "it", forms: Forms = NO_FORMS) -> Any:
    """Returns the value of a dataclass, or of a field's type, that `data` encodes."""
    if is_dataclass(data):  # which a form has made
        return data
    if is_dataclass(type_):
        return _dataclass(type_, data, where, forms)
    origin, arguments = get_origin(type_), get_args(type_)
    if origin in (list, tuple):
        check_type(list, data, where)
        return origin(
            decoded(arguments[0], item, f"{where}[{i}]", forms)
            for i, item in enumerate(data)
        )
    if origin is dict:
        check_type(dict, data, where)
        key, of = arguments
        return {
            key(name): decoded(of, item, f"{where}[{name}]", forms)
            for name, item in data.items()
        }
    if NoneType in arguments:
        (type_,) = {*arguments} - {NoneType}
        return None if data is None else decoded(type_, data, where, forms)
    if type_ is float and type(data) is int:
        data = float(data)
    # All other types are literal strings, which the dataclass checks.
    check_type(type_ if type_ in (int, bool, float) else str, data, where)
    return data


def _dataclass(type_: Any, data: Any, where: str, forms: Forms) -> Any:
    check_type(dict, data, where)
    try:
        values = forms[type_](data) if type_ in forms else data
    except Exception as error:  # of a form that does not fit
        has = " has no " if isinstance(error, KeyError) else ": "
        raise ValueError(f"{where}{has}{error}") from error
    types = {field.name: field.type for field in fields(type_) if field.init}
    if wrong := ", ".join(sorted(values.keys() ^ types.keys())):
        raise ValueError(
            f"{where} has not the fields {', '.join(types)}: {wrong} is missing or "
            f"unknown"
        )
    found = {
        name: decoded(of, values[name], f"{where}.{name}", forms)
        for name, of in types.items()
    }
    try:
        return type_(**found)
    except Exception as error:  # of its own check
        raise ValueError(f"{where}: {error}") from error


def check_type(type_: type, data: Any, where: str) -> None:
    """Checks that a value of JSON has a type, which is not that of a subclass."""
    if type(data) is not type_:
        raise ValueError(f"{where} is {quoted(data, 60)}, expected {type_.__name__}")
