"""Layers that an engine needs stored in the same way."""

from collections.abc import Mapping, Sequence

from rocket_core.candidates import LayerProfile
from rocket_core.errors import InvalidConfigError
from rocket_core.experts import UnfusedExperts, expert_projection
from rocket_core.pipeline.context import Run


def format_groups(run: Run, profiles: Sequence[LayerProfile]) -> tuple[tuple[str, ...], ...]:
    """Return the names of layers that must be stored in the same way, in model order.

    Args:
        run: the run.
        profiles: profiles of all layers.
    """
    engine, experts = run.config.reader, _expert_projections(run)
    groups: dict[str, list[str]] = {}
    for profile in profiles:
        group = experts.get(profile.name)
        if group is None and engine.one_format_per_input:
            group = profile.input_group
        if group is not None:
            groups.setdefault(group, []).append(profile.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def check_ignored_experts(run: Run) -> None:
    """Raise an error if some experts are left alone and others are not, although the engine holds them in one tensor.

    Raises:
        InvalidConfigError: names the tensor, and the pattern that ignores all of its experts.
    """
    selected = {name for block in run.layers for name in block}
    left: dict[str, bool] = {}
    for name, tensor in _expert_projections(run).items():
        if left.setdefault(tensor, name not in selected) != (name not in selected):
            module, _, projection = tensor.rpartition(".")
            raise InvalidConfigError(
                f"{run.config.reader.title} stores {projection} of all experts of {module} in one tensor, and some of "
                f"these layers are ignored: ignore all of them ('*.experts.*.{projection}') or none"
            )


def _expert_projections(run: Run) -> Mapping[str, str]:
    """Return the layers of experts that the engine holds in one tensor, each with a name of that tensor."""
    if run.config.reader.experts_agree is None:
        return {}
    model = run.architecture.model
    modules = {name for name, module in model.named_modules() if isinstance(module, UnfusedExperts)}
    layers = (name for block in run.architecture.layers for name in block)
    found = ((name, expert_projection(name, modules)) for name in layers)
    return {name: tensor for name, tensor in found if tensor is not None}
