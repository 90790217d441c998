"""Groups of options that several commands share, each a dataclass whose fields become options."""

import inspect
from collections.abc import Callable
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import CommandFunctionType

# Where the metadata of a field has its option.
_OPTION = "option"


class Without:
    """Marks fields of a group that a command does not offer: `Annotated[Group, Without("name", ...)]`.

    These fields keep their defaults.
    """

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)


def group_field(option: Any, default: Any = None) -> Any:
    """Return a field of a group with its option; an annotation may declare it instead, if several groups share it."""
    return field(default=default, metadata={_OPTION: option})


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one option for each field of its parameters that are dataclasses.

    The options are where the parameter is, in the order of the fields, with their annotations and defaults; the command
    itself gets the dataclass.

    Args:
        command: a function with keyword-only parameters.

    Raises:
        ValueError: a parameter omits a field that its group does not have.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        group, omitted = _group_of(parameter.annotation)
        if group is None:
            parameters.append(parameter)
            continue
        options = _options(group, omitted)
        parameters += options
        groups[parameter.name] = group, [option.name for option in options]

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, (group, names) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in names})
        command(**values)

    # typer reads both.
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


class CommandGroup(typer.Typer):
    """Commands whose parameters may be groups of options."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Return the decorator of a command, with the arguments of `typer.Typer.command`."""
        register = super().command(*args, **kwargs)

        def registered(command: CommandFunctionType) -> CommandFunctionType:
            register(expand_groups(command))
            return command

        return registered


def _group_of(annotation: Any) -> tuple[type | None, frozenset[str]]:
    kind, *marks = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None, frozenset()
    omitted = frozenset[str]().union(*(mark.names for mark in marks if isinstance(mark, Without)))
    return kind, omitted


def _options(group: Any, omitted: frozenset[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    if unknown := omitted - {each.name for each in fields(group)}:
        raise ValueError(f"{group.__name__} has no fields {', '.join(sorted(unknown))}")
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=_annotation(hints[each.name], each),
        )
        for each in fields(group)
        if each.name not in omitted
    ]


def _annotation(hint: Any, of: Field[Any]) -> Any:
    return Annotated[hint, of.metadata[_OPTION]] if _OPTION in of.metadata else hint
