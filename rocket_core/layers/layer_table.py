"""The table of stored layers in `config.json`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from rocket_core.errors import CheckpointFormatError
from rocket_core.schema import FrozenModel

QUANT_METHOD = "rocket"

FORMAT_VERSION = 2
"""Newest supported version of the disk format. Version 1 has factored layers with their own dictionary; version 2 adds
followers and sparse layers. An artifact without these is written as version 1, which earlier releases can read."""

_REMEDY = "config.json is damaged or does not belong to these weights; fetch it again"

_Count = Annotated[int, Field(ge=1)]


class LayerEntry(FrozenModel):
    """A stored layer in `config.json`."""

    model_config = ConfigDict(strict=True)

    rank: _Count | None = None
    """number of atoms; None if the layer is sparse."""
    nnz: _Count
    """number of stored coefficients."""
    dictionary: str | None = None
    """name in the files of the dictionary owner, with which the dictionary is stored; None if it is stored with this
    layer, or the layer is sparse.
    """

    @property
    def is_sparse(self) -> bool:
        """Whether the coefficients are the weight itself."""
        return self.rank is None

    @property
    def is_follower(self) -> bool:
        """Whether the dictionary belongs to another layer."""
        return self.dictionary is not None


def format_version(entries: Mapping[str, LayerEntry]) -> int:
    """Return the earliest version of the disk format that can represent the table."""
    return 2 if any(entry.is_sparse or entry.is_follower for entry in entries.values()) else 1


def quantization_config(entries: Mapping[str, LayerEntry]) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`.

    Args:
        entries: every stored layer by its name in the files.
    """
    return {
        "quant_method": QUANT_METHOD,
        "format_version": format_version(entries),
        "layers": {name: entry.model_dump(exclude_none=True) for name, entry in entries.items()},
    }


def read_entries(layers: object, version: int) -> dict[str, LayerEntry]:
    """Parse the table, and check that it is consistent.

    Args:
        layers: the value of `layers` in `config.json`; entries that are already parsed are accepted.
        version: version of the disk format, 1 to `FORMAT_VERSION`.

    Raises:
        CheckpointFormatError: an entry has keys or values that the version does not allow, or its dictionary does not
            belong to another layer in the table, or has another rank.
    """
    if not isinstance(layers, Mapping):
        raise CheckpointFormatError(f"quantization_config: layers must be a table; {_REMEDY}")
    entries = {name: _read_entry(name, entry) for name, entry in layers.items()}
    for name, entry in entries.items():
        if version == 1 and (entry.is_sparse or entry.is_follower):
            raise CheckpointFormatError(
                f"quantization_config: layer {name!r} must have a rank and an nnz, and nothing else, in format 1; "
                f"{_REMEDY}"
            )
        if entry.dictionary is not None:
            _check_dictionary_owner(name, entry, entry.dictionary, entries.get(entry.dictionary))
    return entries


def _read_entry(name: str, entry: object) -> LayerEntry:
    try:
        return LayerEntry.model_validate(entry)
    except ValidationError as error:
        wrong = sorted({str(part["loc"][0]) for part in error.errors() if part["loc"]})
        raise CheckpointFormatError(
            f"quantization_config: layer {name!r} must have an nnz and may have a rank, positive integers, and a "
            f"dictionary, the name of another layer, and nothing else; {wrong or 'its entry'} is not so; {_REMEDY}"
        ) from error


def _check_dictionary_owner(name: str, entry: LayerEntry, owner_name: str, owner: LayerEntry | None) -> None:
    if entry.rank is None:
        reason = "has a dictionary and no rank"
    elif owner is None:
        reason = f"takes the dictionary of {owner_name!r}, which is not in the table"
    elif owner.is_sparse or owner.is_follower:
        reason = f"takes the dictionary of {owner_name!r}, which has none"
    elif owner.rank != entry.rank:
        reason = f"has rank {entry.rank}, and the dictionary of {owner_name!r} that it takes {owner.rank}"
    else:
        return
    raise CheckpointFormatError(f"quantization_config: layer {name!r} {reason}; {_REMEDY}")
