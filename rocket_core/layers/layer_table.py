"""The table of stored layers in `config.json`."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rocket_core.errors import CheckpointFormatError
from rocket_core.schema import FrozenModel
from rocket_core.sizes.code_format import CodeBits, CodeFormat, ScaleBits

QUANT_METHOD = "rocket"

FORMAT_VERSION = 3
"""Newest supported version of the disk format. Version 1 has factored layers with their own dictionary; version 2 adds
followers and sparse layers, version 3 quantized layers, packed or entropy coded. An artifact is written as the earliest
version that has all of its kinds, which earlier releases can read."""

_REMEDY = "config.json is damaged or does not belong to these weights; fetch it again"

_COEFFICIENT_KEYS = (
    "either an nnz, and perhaps a rank, positive integers, and a dictionary, the name of another layer, and where "
    "these are codes the keys of codes and with an own dictionary a dictionary_exponent; or bits and the keys of codes"
)
_CODE_KEYS = (
    f"bits, one of {get_args(CodeBits)}, a group_size, a positive integer, scale_bits, one of {get_args(ScaleBits)}, "
    "and a scale_exponent, an integer of at most 100 octaves, and with 8 bits perhaps coded_bytes, a positive integer"
)


def _integer(value: object) -> object:
    # Pydantic takes 4.0 for the literal 4.
    if type(value) is not int:
        raise ValueError("it must be an integer")
    return value


_Count = Annotated[int, Field(ge=1)]
_Integer = BeforeValidator(_integer)
# Bits of codes that are entropy coded, once they are decoded.
_CODED_BITS = 8


class LayerEntry(FrozenModel):
    """A stored layer in `config.json`: made of coefficients (`nnz` and fields around it), of integer codes, or of both.

    If it has both, the coefficients and atoms are codes.
    """

    model_config = ConfigDict(strict=True)

    rank: _Count | None = None
    """number of atoms; None if the layer is sparse or quantized."""
    nnz: _Count | None = None
    """number of stored coefficients; None if the weight itself is quantized."""
    dictionary: str | None = None
    """name in the files of the dictionary owner, with which the dictionary is stored; None if it is stored with this
    layer, or the layer is sparse or quantized.
    """
    bits: Annotated[CodeBits, _Integer] | None = None
    """bits of a code; None if the layer has no codes, as for the fields below."""
    group_size: _Count | None = None
    """inputs that share a scale."""
    scale_bits: Annotated[ScaleBits, _Integer] | None = None
    """bits of a scale."""
    scale_exponent: int | None = None
    """logarithm of the unit of the scales, in steps; see `Scales.exponent`."""
    dictionary_exponent: int | None = None
    """as `scale_exponent`, for the atoms of this layer; None unless it has a dictionary and codes."""
    coded_bytes: _Count | None = None
    """bytes of the codes if they are entropy coded; None if they are packed."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> "LayerEntry":
        coefficients = (self.nnz, self.rank, self.dictionary)
        codes = (self.bits, self.group_size, self.scale_bits, self.scale_exponent)
        if self.coded_bytes is not None and self.bits != _CODED_BITS:
            raise ValueError(f"coded_bytes are of codes of {_CODED_BITS} bits")
        if self.nnz is None and (None in codes or coefficients != (None, None, None)):
            raise ValueError("neither coefficients nor codes are complete")
        if self.nnz is not None and self.bits is not None and (None in codes or self.coded_bytes is not None):
            raise ValueError("its codes are not complete, or entropy coded")
        if self.nnz is not None and self.bits is None and codes != (None, None, None, None):
            raise ValueError("it has coefficients and parts of codes")
        own_codes = self.bits is not None and self.rank is not None and self.dictionary is None
        if own_codes != (self.dictionary_exponent is not None):
            raise ValueError("a dictionary_exponent is for codes of the layer's own dictionary, and these need it")
        for name in ("scale_exponent", "dictionary_exponent"):
            exponent = getattr(self, name)
            if exponent is not None and abs(exponent) > self.code_format.largest_exponent:
                raise ValueError(f"the {name} is not within {self.code_format.largest_exponent} of zero")
        return self

    @classmethod
    def of_codes(cls, code_format: CodeFormat, exponent: int, coded_bytes: int | None = None) -> "LayerEntry":
        """Return the entry of a quantized layer.

        Args:
            code_format: bits of codes and scales, and the size of groups.
            exponent: see `Scales.exponent`.
            coded_bytes: bytes of the codes if they are entropy coded.
        """
        return cls(
            bits=code_format.bits,
            group_size=code_format.group_size,
            scale_bits=code_format.scale_bits,
            scale_exponent=exponent,
            coded_bytes=coded_bytes,
        )

    @property
    def code_format(self) -> CodeFormat:
        """The format of codes."""
        assert self.bits is not None
        assert self.group_size is not None
        assert self.scale_bits is not None
        return CodeFormat(bits=self.bits, group_size=self.group_size, scale_bits=self.scale_bits)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight itself is made of integer codes."""
        return self.bits is not None and self.nnz is None

    @property
    def is_sparse(self) -> bool:
        """Whether the layer is made of coefficients that are the weight itself."""
        return self.rank is None and not self.is_quantized

    @property
    def is_follower(self) -> bool:
        """Whether the dictionary belongs to another layer."""
        return self.dictionary is not None


def format_version(entries: Mapping[str, LayerEntry]) -> int:
    """Return the earliest version of the disk format that can represent the table."""
    return max((_version(entry) for entry in entries.values()), default=1)


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
        if _version(entry) > version:
            allowed = "have a rank and an nnz, and nothing else," if version == 1 else "have no bits"
            raise CheckpointFormatError(
                f"quantization_config: layer {name!r} must {allowed} in format {version}; {_REMEDY}"
            )
        if entry.dictionary is not None:
            _check_dictionary_owner(name, entry, entry.dictionary, entries.get(entry.dictionary))
    return entries


def _version(entry: LayerEntry) -> int:
    """Return the earliest version of the disk format that has layers of this kind."""
    if entry.bits is not None:
        return 3
    return 2 if entry.is_sparse or entry.is_follower else 1


def _read_entry(name: str, entry: object) -> LayerEntry:
    try:
        return LayerEntry.model_validate(entry)
    except ValidationError as error:
        wrong = sorted({str(part["loc"][0]) for part in error.errors() if part["loc"]})
        reasons = [str(part["ctx"]["error"]) for part in error.errors() if part["type"] == "value_error"]
        reason = f"{wrong or 'its entry'} is not so" if wrong or not reasons else reasons[0]
        has_codes = isinstance(entry, Mapping) and "bits" in entry and "nnz" not in entry
        raise CheckpointFormatError(
            f"quantization_config: layer {name!r} must have {_CODE_KEYS if has_codes else _COEFFICIENT_KEYS}, and "
            f"nothing else; {reason}; {_REMEDY}"
        ) from error


def _check_dictionary_owner(name: str, entry: LayerEntry, owner_name: str, owner: LayerEntry | None) -> None:
    if entry.rank is None:
        reason = "has a dictionary and no rank"
    elif owner is None:
        reason = f"takes the dictionary of {owner_name!r}, which is not in the table"
    elif owner.rank is None or owner.is_follower:
        reason = f"takes the dictionary of {owner_name!r}, which has none"
    elif (owner.bits is None) != (entry.bits is None):
        reason = f"and {owner_name!r}, whose dictionary it takes, must both be made of codes, or none of them"
    elif owner.rank != entry.rank:
        reason = f"has rank {entry.rank}, and the dictionary of {owner_name!r} that it takes {owner.rank}"
    else:
        return
    raise CheckpointFormatError(f"quantization_config: layer {name!r} {reason}; {_REMEDY}")
