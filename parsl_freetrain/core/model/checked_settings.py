"""The base of all settings: frozen records whose names and types are checked when they are made."""

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from msgspec import NODEFAULT, Struct, StructMeta, ValidationError, convert, structs

from parsl_freetrain.core.model.checked_values import check_value, hints_of, wrong_with
from parsl_freetrain.core.model.errors import BadInput, shown

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
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                if not str(error).startswith('Extra positional'):
                    raise
                name = self.__name__
                say = f'{name}({names[0]}={shown(args[0])})'
                raise BadInput(f'{name} takes its settings by name: say {say}.') from None


class Settings(
    Struct,
    frozen=True,
    kw_only=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=_Checking,
):
    """Base of groups of settings, checked by type and ``msgspec.Meta``; ``repr``: the call."""


S = TypeVar('S', bound=Settings)


def read_settings(kind: type[S], where: str, values: Mapping[str, Any]) -> S:
    """Settings from a file, where lists are tuples and texts enum members; or BadInput."""
    try:
        return convert(values, kind)
    except ValidationError as error:
        wrong = '; '.join(_mistakes(kind, values)) or str(error).removesuffix('.')
        raise BadInput(f'{where}: {wrong}.' if where else f'{wrong}.') from None


def _mistakes(kind: type[Settings], values: Mapping[str, Any]) -> Iterator[str]:
    hints = hints_of(kind)
    for each in structs.fields(kind):
        if each.required and each.name not in values:
            yield f'{each.name} is missing'
    for name, value in values.items():
        if name not in hints:
            said = name if name.isprintable() else ascii(name)
            near = difflib.get_close_matches(name, kind.__struct_fields__, 1)
            known = f'say {near[0]}' if near else f'there are {", ".join(kind.__struct_fields__)}'
            yield f'there is no {said}; {known}'
        elif group := _group_in(hints[name]):
            yield from _mistakes_in_group(name, value, hints[name], *group)
        else:
            try:
                check_value(name, value, hints[name], read=True)
            except BadInput as error:
                yield str(error).removesuffix('.')


def _group_in(hint: Any) -> tuple[type[Settings], bool] | None:
    """The group of settings that a type has in it, and whether it is a list of them."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        return hint, False
    for part in typing.get_args(hint):
        if found := _group_in(part):
            return found[0], found[1] or typing.get_origin(hint) is tuple
    return None


def _mistakes_in_group(
    name: str, value: object, hint: Any, group: type[Settings], several: bool
) -> Iterator[str]:
    for number, one in enumerate(value if several and isinstance(value, list) else [value], 1):
        place = f'{name}[{number - 1}]' if several and one is not value else name
        if isinstance(one, Mapping) and not (several and one is value):
            called = one.get('name') or one.get('id')
            title = f'{name.removesuffix("s")} {shown(called)}' if called else place
            for mistake in _mistakes(group, one):
                yield f'{title if several else name}: {mistake}'
        elif wrong := wrong_with(one, group if one is not value else hint, read=True):
            yield f'{place} is {shown(one)}; it must be {wrong.must}'


def given(settings: Settings) -> dict[str, Any]:
    """The settings that are not as by default."""
    return {
        each.name: value
        for each in structs.fields(settings)
        if (value := getattr(settings, each.name)) != each.default
        and (each.default_factory is NODEFAULT or value != each.default_factory())
    }


def described(kind: type[Settings]) -> dict[str, str]:
    """What its documentation says about each setting, in one line."""
    _, _, section = inspect.cleandoc(kind.__doc__ or '').partition('Attributes\n----------\n')
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if not line.startswith(' '):
            names = line.split(', ')
        for name in names:
            found[name] = f'{found.get(name, "")} {line.strip()}'.strip() if line[:1] == ' ' else ''
    return {name: text.replace('``', '') for name, text in found.items()}


def refuse_unknown(
    where: str,
    given: Iterable[str],
    known: Iterable[str],
    elsewhere: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """BadInput for an unknown argument, with the most similar one, or ``elsewhere`` its group."""
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
    """Decorator: refuses misspelt keywords and wrong types. ``groups``: by argument, its class."""
    elsewhere = {written: group.__struct_fields__ for written, group in groups}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        known = [each.name for each in parameters if each.name != 'self']
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

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
