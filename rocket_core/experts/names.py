"""Names of experts in checkpoints: transformers' own conversions, adapted to models with unfused experts."""

import re
from collections.abc import Container, Iterable
from typing import Any

from transformers.core_model_loading import WeightRenaming

# The parameters of all experts, as targets of transformers' conversions.
_FUSED = re.compile(r"(?P<module>(?:.*\.)?experts)\.(?P<parameter>gate_up_proj|up_proj|down_proj)$")
_MERGE, _JOIN = ("MergeModulelist",), ("MergeModulelist", "Concatenate")
# An expert's layers, in the order in which the conversion to a parameter takes them.
_SOURCES = {
    ("gate_up_proj", _JOIN): ("gate_proj", "up_proj"),
    ("up_proj", _MERGE): ("up_proj",),
    ("down_proj", _MERGE): ("down_proj",),
}
_NUMBER = r"(\d+)"
_LAYER = re.compile(r"(.+)\.\d+\.([^.]+)")
# Where files store the parameter of all experts, but with the last two axes exchanged.
_TURN = ("Transpose",)


def unfused_conversions(conversions: Iterable[Any]) -> list[Any]:
    """Return conversions between the names in files and those of a model with unfused experts.

    Where transformers merges the matrices of experts into one parameter, they are only renamed. Where it transposes
    the parameter of all experts, nothing is left: see `FusedParameter.as_stored`.

    Args:
        conversions: transformers' conversions for the model, before unfusing.
    """
    adapted: list[Any] = []
    for conversion in conversions:
        if _is_turned(conversion):
            continue
        projections = _merged_projections(conversion)
        adapted += [conversion] if projections is None else _renamings(conversion, projections)
    return adapted


def unknown_conversions(conversions: Iterable[Any]) -> list[str]:
    """Return the parameters of experts that are converted otherwise than by merging or transposing a file's."""
    return [
        conversion.target_patterns[0]
        for conversion in conversions
        if hasattr(conversion, "operations")
        and any(_FUSED.match(target) for target in conversion.target_patterns)
        and _merged_projections(conversion) is None
        and not _is_turned(conversion)
    ]


def is_expert_name(name: str, modules: Iterable[str]) -> bool:
    """Return whether a layer belongs to an expert of one of the given modules."""
    return any(re.match(rf"{re.escape(module)}\.\d+\.", f"{name}.") for module in modules)


def expert_projection(name: str, modules: Container[str]) -> str | None:
    """Return the name of an expert's layer without the expert's number; None if it belongs to none of the modules."""
    found = _LAYER.fullmatch(name)
    return f"{found[1]}.{found[2]}" if found is not None and found[1] in modules else None


def _is_turned(conversion: Any) -> bool:
    """Return whether a conversion does nothing but exchange the last two axes of a parameter of all experts."""
    operations: list[Any] = list(getattr(conversion, "operations", ()))
    names, targets = tuple(type(operation).__name__ for operation in operations), conversion.target_patterns
    same = len(targets) == 1 and list(conversion.source_patterns) == list(targets)
    return (
        names == _TURN
        and {operations[0].dim0, operations[0].dim1} == {1, 2}
        and same
        and bool(_FUSED.match(targets[0]))
    )


def _merged_projections(conversion: Any) -> tuple[str, ...] | None:
    """Return the projections that a conversion merges; None if it does anything else."""
    operations = tuple(type(operation).__name__ for operation in getattr(conversion, "operations", ()))
    target = _FUSED.match(conversion.target_patterns[0])
    if target is None or len(conversion.target_patterns) != 1:
        return None
    projections = _SOURCES.get((target["parameter"], operations))
    sources = conversion.source_patterns
    fits = projections is not None and len(sources) == len(projections)
    return projections if fits and all(source.count("*") == 1 for source in sources) else None


def _renamings(conversion: Any, projections: tuple[str, ...]) -> list[Any]:
    target = _FUSED.match(conversion.target_patterns[0])
    assert target is not None
    renamings = []
    for source, projection in zip(conversion.source_patterns, projections, strict=True):
        # Without the ending, so that other tensors of a stored layer are renamed as well.
        pattern = source.removesuffix(".weight").replace("*", _NUMBER)
        renaming = WeightRenaming(pattern, rf"{target['module']}.\1.{projection}")
        renaming.scope_prefix, renaming.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
        renamings.append(renaming)
    return renamings
