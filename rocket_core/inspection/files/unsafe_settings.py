"""Settings of a model that make transformers run code, load kernels from the Hub, or read other files.

Settings that a model does not depend on, such as how attention is computed, are removed; settings that would make other
weights or code part of the model are rejected. Loads no torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rocket_core.errors import CheckpointFormatError, UnsupportedArchitectureError

# Names of classes in code shipped with the model, of other configuration files, of kernels, and permissions.
_CODE = frozenset(
    {
        "allow_all_kernels",
        "auto_map",
        "configuration_files",
        "custom_generate",
        "custom_pipelines",
        "fusion_config",
        "kernel_config",
        "trust_remote_code",
        "use_kernels",
    }
)
# How attention and experts are computed: each may be the id of a repository on the Hub, whose code is then loaded;
# `flash_attention_2` becomes one if the package is not installed.
_IMPLEMENTATIONS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
        "attn_implementation",
        "experts_implementation",
    }
)
_SAFE_IMPLEMENTATIONS = frozenset({"eager", "sdpa", "batched_mm", "grouped_mm", None})
# Models of the timm package, whose settings name repositories and pickled weights.
_TIMM = frozenset({"timm_backbone", "timm_wrapper"})
_MAX_DEPTH = 64


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that locate code, at any depth, and otherwise unchanged.

    Args:
        settings: content of a JSON file of a model.
    """
    return {key: _cleaned(value) for key, value in settings.items() if _is_kept(key, value)}


def check_redirections(settings: Mapping[str, Any], name: str) -> None:
    """Raise an error if a configuration makes a model use files other than its own.

    Args:
        settings: content of config.json.
        name: name of the file in messages.

    Raises:
        CheckpointFormatError: the configuration names other weights, or is nested too deeply.
        UnsupportedArchitectureError: a part of the model is built by another package.
    """
    for key, value in _walk(settings, name, 0):
        if key == "transformers_weights" and value is not None:
            raise CheckpointFormatError(
                f"{name}: transformers_weights names other weights than those of the model; remove it"
            )
        if (key == "model_type" and isinstance(value, str) and value in _TIMM) or (
            key == "use_timm_backbone" and value is True
        ):
            raise UnsupportedArchitectureError(
                f"{name}: {key}: a part of the model is built by the package timm, which is not supported"
            )


def _is_kept(key: str, value: object) -> bool:
    if key in _CODE:
        return False
    if key not in _IMPLEMENTATIONS:
        return True
    chosen = list(value.values()) if isinstance(value, dict) else [value]
    return all(isinstance(choice, str | None) and choice in _SAFE_IMPLEMENTATIONS for choice in chosen)


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return without_code(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


def _walk(value: object, name: str, depth: int) -> Iterator[tuple[str, object]]:
    if depth > _MAX_DEPTH:
        raise CheckpointFormatError(f"{name} is nested more than {_MAX_DEPTH} deep; replace it by the original")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            yield from _walk(inner, name, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk(inner, name, depth + 1)
