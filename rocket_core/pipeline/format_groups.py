"""Layers that an engine needs stored in the same way."""

from collections.abc import Mapping, Sequence

from rocket_core.candidates import FormatGroup, LayerProfile
from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.experts import expert_projection, unfused_modules
from rocket_core.pipeline.context import Run
from rocket_core.sizes.code_format import formats_for


def format_groups(run: Run, profiles: Sequence[LayerProfile]) -> tuple[FormatGroup, ...]:
    """Return the layers that must be stored in the same way, in model order.

    Args:
        run: the run.
        profiles: profiles of all layers.
    """
    engine, experts = run.config.reader, _agreeing_experts(run)
    groups: dict[str, list[str]] = {}
    for profile in profiles:
        group = experts.get(profile.name)
        if group is None and engine.one_format_per_input:
            group = profile.input_group
        if engine.quantizes_all:
            group = profile.name
        if group is not None:
            groups.setdefault(group, []).append(profile.name)
    quantized = set(experts.values()) if engine.experts_agree == "model" else set()
    quantized |= set(groups) if engine.quantizes_all else set()
    return tuple(FormatGroup(layers=tuple(names), dense=group not in quantized) for group, names in groups.items())


def check_experts(run: Run) -> None:
    """Raise an error if experts that must be stored in the same way cannot be.

    Raises:
        InvalidConfigError: some of them are ignored, or all where the engine needs quantized ones.
        UnsupportedArchitectureError: their sizes have no format in common.
    """
    engine, agreeing = run.config.reader, _agreeing_experts(run)
    selected = {name for block in run.layers for name in block}
    kept = {group for name, group in agreeing.items() if name in selected}
    ignored = next((name for name in agreeing if name not in selected), None)
    if ignored is not None and engine.experts_agree == "model":
        raise InvalidConfigError(
            f"files for {engine.title} cannot have {ignored} dense next to quantized layers, because transformers "
            "reads all experts as quantized then; ignore no experts, or use the engine rocket"
        )
    if ignored is not None and agreeing[ignored] in kept:
        raise InvalidConfigError(
            f"{engine.title} stores these layers of all experts in one tensor, and {ignored} is ignored while others "
            f"are not; ignore all of them ('*.experts.*.{ignored.rpartition('.')[2]}') or none"
        )
    if agreeing and engine.experts_agree == "model":
        widths = sorted({run.architecture.shape(name)[0] for name in agreeing})
        formats = [
            {(one.bits, one.group_size) for one in formats_for(d_in, run.config.code_choices)} for d_in in widths
        ]
        if not set.intersection(*formats):
            raise UnsupportedArchitectureError(
                f"{engine.title} needs all experts of {run.source.name} in one format, and layers with "
                f"{' and '.join(map(str, widths))} inputs have none in common; use the engine rocket"
            )


def check_all_quantized(run: Run) -> None:
    """Raise an error if a linear layer of a block would stay dense for an engine that reads none.

    Raises:
        InvalidConfigError: one is ignored, or not compressed for another reason.
        UnsupportedArchitectureError: one suits none of the engine's formats.
    """
    engine, choices = run.config.reader, run.config.code_choices
    if not engine.quantizes_all:
        return
    selected = {name for block in run.layers for name in block}
    for name in (name for block in run.architecture.layers for name in block):
        d_in = run.architecture.shape(name)[0]
        if name not in selected:
            raise InvalidConfigError(
                f"files for {engine.title} have codes for every linear layer, and {name} is {run.skipped[name]}; "
                "ignore no layers, or use the engine rocket"
            )
        # Where a layer has fewer inputs than a group, the group is the layer, which may be of an odd size.
        sizes = {one.group_size for one in formats_for(d_in, choices)}
        if not sizes or not sizes <= set(choices.group_sizes or ()):
            raise UnsupportedArchitectureError(
                f"files for {engine.title} have codes for every linear layer, in groups of 32, 64 or 128 inputs, "
                f"and {name} has {d_in} inputs; use the engine rocket"
            )


def _agreeing_experts(run: Run) -> Mapping[str, str]:
    """Return the layers of experts that must agree with others, each with a name of those others."""
    scope = run.config.reader.experts_agree
    if scope is None:
        return {}
    modules = unfused_modules(run.architecture.model)
    layers = (name for block in run.architecture.layers for name in block)
    found = ((name, expert_projection(name, modules)) for name in layers)
    return {name: tensor if scope == "projection" else scope for name, tensor in found if tensor is not None}
