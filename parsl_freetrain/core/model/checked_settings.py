"""The base of all settings: frozen records whose names and types are checked when they are made."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from msgspec import NODEFAULT, Struct, StructMeta, convert, structs

from parsl_freetrain.core.model.checked_values import check_value
from parsl_freetrain.core.model.errors import BadInput

P = ParamSpec('P')
R = TypeVar('R')


class _Checking(StructMeta):
    """Checks the arguments of a class before msgspec sees them."""

    if not TYPE_CHECKING:  # type checkers read the fields

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            names = self.__struct_fields__
            refuse_unknown(self.__name__, kwargs, names)
            for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
                check_value(f'{self.__name__}: {name}', value, hints_of(self)[name])
            return super().__call__(*args, **kwargs)


class Settings(
    Struct,
    frozen=True,
    kw_only=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=_Checking,
):
    """Base of a group of settings: arguments are attributes of the same name, and ``repr`` gives
    the call that makes an equal one. Raises BadInput for an unknown name, which is compared with
    the known ones, or a value of another type or beyond the bounds of its ``msgspec.Meta``.
    """


S = TypeVar('S', bound=Settings)


def read_settings(kind: type[S], where: str, values: Mapping[str, object]) -> S:
    """Settings that were read from a file, where lists stand for tuples and texts for members of an
    Enum.

    Raises
    ------
    BadInput
        With ``where``, and everything that cannot be used, in one sentence.
    """
    wrong = [
        f'{each.name} is missing'
        for each in structs.fields(kind)
        if each.required and each.name not in values
    ]
    read, hints = {}, hints_of(kind)
    for name, value in values.items():
        if name not in hints:
            known = ', '.join(sorted(kind.__struct_fields__))
            wrong.append(f'{name}: there is no such setting (there are {known})')
            continue
        try:
            check_value(name, value, hints[name], read=True)
            read[name] = convert(value, hints[name])
        except BadInput as error:
            wrong.append(str(error).removesuffix('.'))
    if wrong:
        raise BadInput(f'{where}: {"; ".join(wrong)}.')
    try:
        return kind(**read)
    except BadInput as error:
        raise BadInput(f'{where}: {error}') from None


def given(settings: Settings) -> dict[str, Any]:
    """The settings that are not as by default."""
    return {
        each.name: value
        for each in structs.fields(settings)
        if (value := getattr(settings, each.name)) != each.default
        and (each.default_factory is NODEFAULT or value != each.default_factory())
    }


def refuse_unknown(
    where: str,
    given: Iterable[str],
    known: Iterable[str],
    elsewhere: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """Refuse an argument that does not exist.

    Parameters
    ----------
    where
        What was called.
    given, known
        Names of arguments.
    elsewhere
        Names that belong into a group, by how the group is written: ``{'policy=Policy':
        ('metric',)}``.

    Raises
    ------
    BadInput
        For the first unknown name; the sentence says which known one is most like it.
    """
    known = list(known)
    written = {name: name for name in known}
    for group, names in (elsewhere or {}).items():
        written = {name: f'{group}({name}=...)' for name in names} | written
    for name in given:
        if name in known:
            continue
        near = [name] if name in written else difflib.get_close_matches(name, written, 1)
        hint = f'say {written[near[0]]}' if near else f'it has {", ".join(known)}'
        raise BadInput(f'{where} has no argument {name!r}; {hint}.')


def checked_arguments(
    where: str, *groups: tuple[str, type[Struct]]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function or constructor whose arguments are settings: misspelt keywords and
    values of another type are refused with a sentence.

    Parameters
    ----------
    where
        What sentences call the function.
    *groups
        How a group of settings is written as an argument, ``'policy=Policy'``, and its class, so
        that a sentence can name the group that a misplaced setting belongs to.
    """
    elsewhere = {written: group.__struct_fields__ for written, group in groups}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)
        known = [name for name in names if name != 'self']

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if where.startswith('@') and args and inspect.isfunction(args[0]):
                raise BadInput(
                    f'{where} on {args[0].__name__!r} has no parentheses: say how much to train, '
                    f'such as {where}(total_epochs=10).'
                )
            refuse_unknown(where, kwargs, known, elsewhere)
            for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
                if name != 'self':
                    check_value(f'{where}: {name}', value, hints_of(function)[name])
            return function(*args, **kwargs)

        return checked

    return decorate


@functools.cache
def hints_of(of: Callable[..., Any]) -> dict[str, Any]:
    """The types of a class's fields or a function's arguments, with their bounds."""
    return typing.get_type_hints(of, include_extras=True)
