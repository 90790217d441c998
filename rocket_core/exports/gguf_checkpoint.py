"""Checkpoints out of GGUF files, for models of which nothing else is at hand.

Settings, rotations and tokenizer are made from the metadata and written again for comparison, so that a file is refused
if it has a setting that the checkpoint would lose. `transformers` 5.23 reads such files too, and loses how the range of
positions is extended, biases of Llama, the scale of attention of Gemma's largest models and ways of cutting text into
words, without a word.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from rocket_core.checkpoint.writer import TensorPlan, plan_tensor, write_checkpoint
from rocket_core.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    InvalidConfigError,
    UnsupportedExportError,
)
from rocket_core.exports.gguf_model import GgufPlan, plan_gguf
from rocket_core.exports.gguf_reader import restored
from rocket_core.exports.gguf_settings import class_of, settings_of
from rocket_core.exports.gguf_vocabulary import save_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_SHARD_BYTES = 2**32
# Metadata that change nothing that is computed.
_INERT = frozenset({"rope.scaling.finetuned", "attention.causal"})
_TOKENIZER = ("model", "tokens", "add_space_prefix", "add_eos_token", "bos_token_id", "eos_token_id")


def write_gguf_checkpoint(file: Path, folder: Path, *, on_tensor: Callable[[str], None] = lambda _key: None) -> str:
    """Write the model of a GGUF file as a checkpoint in bfloat16, tensor by tensor.

    Args:
        file: the file.
        folder: an empty folder.
        on_tensor: called with each name before it is written.

    Returns:
        How the file stores most of its weights, with the bits of a weight.

    Raises:
        InvalidConfigError: the package that reads such files is not installed.
        CorruptCheckpointError: the file is damaged or not a GGUF file.
        UnsupportedArchitectureError: models or tokenizers of this kind are not read.
        CheckpointFormatError: it has a tensor or a setting that the checkpoint would lose.
    """
    if find_spec("gguf") is None:
        raise InvalidConfigError(f"reading {file} needs gguf: pip install 'rocket-compress[gguf]'")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{file} is not a GGUF file, or damaged ({error})") from error
    if metadata.get("split.count", 1) > 1:
        raise CheckpointFormatError(
            f"{file} is one of {metadata['split.count']} parts of a model; join them with `llama-gguf-split --merge`"
        )
    try:
        plan = _write_settings(reader, metadata, folder)
        tensors = [planned for tensor in reader.tensors for planned in _planned(tensor, plan)]
    except UnsupportedExportError as error:
        raise CheckpointFormatError(f"{file} cannot be turned into a checkpoint: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"{file} cannot be turned into a checkpoint: its metadata lack a value, or have one that is malformed "
            f"({type(error).__name__}: {error})"
        ) from error
    lost = [*_lost_settings(metadata, plan), *_lost_factors(reader, plan)]
    if lost:
        raise CheckpointFormatError(
            f"{file} has settings that its checkpoint would lose: {', '.join(lost)}; give the original checkpoint"
        )
    write_checkpoint(folder, tensors, max_shard_bytes=_SHARD_BYTES, on_tensor=on_tensor)
    return _storage(reader)


def _write_settings(reader: "GGUFReader", metadata: Mapping[str, Any], folder: Path) -> GgufPlan:
    """Write config.json and the tokenizer, and return what the file of such a model contains."""
    shapes = {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
    factors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    named = class_of(metadata)
    config = getattr(transformers, named).config_class(**settings_of(metadata, shapes, factors))
    config.architectures, config.dtype = [named], torch.bfloat16
    config.save_pretrained(folder)
    save_tokenizer(metadata, folder)
    return plan_gguf(json.loads((folder / "config.json").read_text()), folder)


def _planned(tensor: "ReaderTensor", plan: GgufPlan) -> Iterator[TensorPlan]:
    """Yield the tensors of the checkpoint that a tensor of the file has."""
    from gguf import dequantize

    shape = tuple(map(int, reversed(tensor.shape)))
    for number, key in enumerate(plan.keys(tensor.name)):
        rules = plan.tensor(key)
        assert rules is not None, key
        # Rows of an expert are read alone, so that memory is that of one matrix.
        stored = tensor.data if rules.expert is None else tensor.data[number]
        own = (1, shape[-1]) if rules.flat else shape if rules.expert is None else shape[1:]

        def read(stored: Any = stored, rules: Any = rules) -> torch.Tensor:
            return restored(torch.from_numpy(dequantize(stored, tensor.tensor_type).copy()), rules)

        yield plan_tensor(key, torch.bfloat16, own, read)


def _lost_settings(metadata: Mapping[str, Any], plan: GgufPlan) -> Iterator[str]:
    """Yield the settings of a file that the file of its checkpoint would not have."""
    prefix = f"{plan.family.arch}."
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        compared = key.startswith(prefix) and name not in _INERT
        if name == "attention.sliding_window":
            compared = 0 < value < metadata[f"{prefix}context_length"]
        if name == "rope.scaling.original_context_length":
            compared = f"{prefix}rope.scaling.type" in plan.metadata
        if key.startswith("tokenizer.ggml."):
            compared = key.removeprefix("tokenizer.ggml.") in _TOKENIZER
        written = plan.metadata[key].content if key in plan.metadata else None
        if compared and not _same(value, written):
            yield f"{key} {_short(value)}{'' if written is None else f' (it would have {_short(written)})'}"


def _lost_factors(reader: "GGUFReader", plan: GgufPlan) -> Iterator[str]:
    """Yield the tensors with divisors of rotations that differ from those of the checkpoint."""
    for tensor in reader.tensors:
        if tensor.name in plan.computed:
            pairs = zip(tensor.data.tolist(), plan.computed[tensor.name], strict=True)
            if not all(_same(own, other) for own, other in pairs):
                yield f"the factors in {tensor.name}"


def _same(value: Any, written: Any) -> bool:
    if isinstance(value, float) and isinstance(written, float):
        return math.isclose(value, written, rel_tol=1e-4)
    # A switch that is off may be left out.
    return bool(value == written) or (value is False and written is None)


def _short(value: Any) -> str:
    return f"of {len(value)} values" if isinstance(value, list) else str(value)


def _storage(reader: "GGUFReader") -> str:
    """Return how most weights are stored, and the bits of a weight."""
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    bits = 8 * sum(sizes.values()) / sum(int(tensor.n_elements) for tensor in reader.tensors)
    return f"GGUF, mostly {max(sizes, key=lambda name: sizes[name])}, {bits:.3g} bits"
