"""Filling a model's modules from a checkpoint, one module at a time.

This is the only place that calls the loader inside transformers, which knows all renamings and merges that newer module
trees need. Its functions are not public; versions 5.17 to 5.23 are known to work.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from rocket_core.checkpoint.reader import Checkpoint, DecodedEntry, PartEntry, TensorEntry, split_experts
from rocket_core.errors import CorruptCheckpointError
from rocket_core.experts import fused_parameters, unfused_conversions

_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


class WeightLoader:
    """Loader and unloader for parts of one model.

    Args:
        model: a model with its parameters on the meta device.
        checkpoint: the model's safetensors.
        device: device to which parameters are loaded.

    Raises:
        CorruptCheckpointError: a tensor has a different shape than the model's configuration requires.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._device = device
        fused = fused_parameters(model)
        mapping = get_model_conversion_mapping(model)
        if fused:
            mapping = unfused_conversions(mapping)
        self._mapping = [item for item in mapping if isinstance(item, WeightRenaming | WeightConverter)]
        renamings = [item for item in self._mapping if isinstance(item, WeightRenaming)]
        converters = [item for item in self._mapping if isinstance(item, WeightConverter)]
        skeleton = model.state_dict()
        self._targets: dict[str, str] = {}
        self._disk_keys: dict[str, str] = {}
        self._tied: dict[str, str] = {}
        self._parts: dict[str, dict[str, PartEntry]] = {}
        self._unknown: dict[str, str] = {}
        known = skeleton | fused
        for key in checkpoint.entries:
            target, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            if target not in known and key in known:
                target, converter = key, None
            if converter is None and target in fused:
                stored = fused[target].as_stored(checkpoint.entries[key].shape)
                self._check_shape(key, stored.shape)
                self._parts[key] = split_experts(checkpoint.entries[key], stored)
                continue
            self._targets[key] = target
            if target not in known:
                self._unknown[target] = key
            if converter is None and target in skeleton:
                self._disk_keys[target] = key
        self._part_of = {name: entry for parts in self._parts.values() for name, entry in parts.items()}
        self._adopt_tied_names(skeleton)
        for parameter, key in self._disk_keys.items():
            self._check_shape(key, tuple(skeleton[parameter].shape))

    def _check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        stored = self._checkpoint.entries[key].shape
        if expected != stored:
            raise CorruptCheckpointError(
                f"{self._checkpoint.folder}: {key} has shape {stored}, which does not fit the shapes that config.json "
                f"asks for: {expected}; restore the config.json that belongs to these weights"
            )

    def _adopt_tied_names(self, skeleton: Mapping[str, object]) -> None:
        """Map tied parameters that the checkpoint holds under their other name."""
        for one, other in self._model.all_tied_weights_keys.items():
            for stored, alias in ((one, other), (other, one)):
                if stored in self._disk_keys and alias not in self._disk_keys and alias in skeleton:
                    self._tied[alias] = self._disk_keys[stored]

    def entry(self, parameter: str) -> TensorEntry | None:
        """Return the location of a parameter; None if it is stored merged with others, or not at all.

        A parameter of an expert may be a part of a tensor of all experts; its key is then its name in the model.
        """
        key = self._disk_keys.get(parameter)
        return self._part_of.get(parameter) if key is None else self._checkpoint.entries[key]

    def parts(self, key: str) -> Mapping[str, PartEntry]:
        """Return the tensors of single experts within a tensor of the checkpoint, by name; none for most tensors."""
        return self._parts.get(key, {})

    def unexpected(self) -> dict[str, TensorEntry]:
        """Return the stored tensors that the model has no place for, by the names that they would have in it.

        Left out are those that transformers ignores knowingly, and the masks that older versions stored.
        """
        info: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(self._unknown))
        self._model._adjust_missing_and_unexpected_keys(info)
        found = {name: self._checkpoint.entries[self._unknown[name]] for name in sorted(info.unexpected_keys)}
        return {name: entry for name, entry in found.items() if not _is_mask(entry)}

    def load(self, modules: Iterable[str], *, without: Iterable[str] = ()) -> None:
        """Load all parameters and persistent buffers of the given modules. None of them requires a gradient.

        Args:
            modules: module names.
            without: names of modules within them that are left out, except for what `modules` names within these.

        Raises:
            CorruptCheckpointError: a parameter is missing in the checkpoint, or has a different shape there.
        """
        names, left_out = tuple(modules), tuple(without)
        keys = {key: key for key, target in self._targets.items() if _is_under(target, names, left_out)}
        keys |= {parameter: key for parameter, key in self._tied.items() if _is_under(parameter, names, left_out)}
        parts = {name: _Whole(entry) for name, entry in self._part_of.items() if _is_under(name, names, left_out)}
        parts |= {
            name: _Whole(entry)
            for name, key in keys.items()
            if isinstance(entry := self._checkpoint.entries[key], DecodedEntry)
        }
        keys = {name: key for name, key in keys.items() if name not in parts}
        files = {key: self._checkpoint.entries[key].file for key in keys.values()}
        # Plain reads instead of a memory map: a mapped checkpoint would count towards this process's memory.
        handles = {file: safe_open(file, "pt", backend="pread") for file in sorted(set(files.values()))}
        with _quietly(threads=torch.device(self._device).type != "cpu"):
            info, _ = convert_and_load_state_dict_in_model(
                self._model,
                {name: handles[files[key]].get_slice(key) for name, key in keys.items()} | parts,
                LoadStateDictConfig(
                    device_map={"": self._device},
                    dtype=self._model.dtype,
                    weight_mapping=copy.deepcopy(self._mapping),
                ),
            )
        problems = [*info.mismatched_keys, *info.conversion_errors]
        if problems:
            raise CorruptCheckpointError(
                f"{self._checkpoint.folder}: {problems[0]} does not fit the shapes that config.json asks for"
            )
        for name in names:
            self._model.get_submodule(name).requires_grad_(requires_grad=False)
        missing = [
            key for name in names for key in _missing_parameters(self._model, name) if _is_under(key, names, left_out)
        ]
        if missing:
            raise CorruptCheckpointError(
                f"{self._checkpoint.folder} lacks {len(missing)} tensors, the first is {missing[0]!r}; fetch the "
                "checkpoint again"
            )

    def will_load(self, module: str) -> None:
        """Let the system read what `load` will, while something else is computed; nothing happens outside POSIX."""
        if not hasattr(os, "posix_fadvise"):
            return
        entries = self._checkpoint.entries
        keys = {key for key, target in self._targets.items() if _is_under(target, (module,), ())}
        keys |= {key for key, parts in self._parts.items() if any(_is_under(name, (module,), ()) for name in parts)}
        for entry in map(entries.__getitem__, keys):
            for part in entry.parts.values() if isinstance(entry, DecodedEntry) else (entry,):
                with part.file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), part.start, part.nbytes, os.POSIX_FADV_WILLNEED)

    def unload(self, module: nn.Module) -> None:
        """Free the parameters of a module; buffers stay."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that transformers reads as it reads those of safetensors: `tensor[...]`."""

    entry: TensorEntry

    def __getitem__(self, _index: object) -> torch.Tensor:
        return self.entry.read()


@contextmanager
def _quietly(*, threads: bool) -> Iterator[None]:
    """Configure transformers for loading many small parts of a model.

    A progress bar for every layer would drown out the run's own. On a CPU the loading threads would leave freed memory
    in as many allocator arenas, which adds a tenth to the peak and varies between runs. An accelerator waits for what
    they read, and one alone copies 1.6 GB in a second.

    Args:
        threads: whether several threads read.
    """
    bar, set_before = logging.is_progress_bar_enabled(), os.environ.get(_NO_THREADS)
    logging.disable_progress_bar()
    os.environ[_NO_THREADS] = "0" if threads else "1"
    try:
        yield
    finally:
        if bar:
            logging.enable_progress_bar()
        if set_before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = set_before


def _is_mask(entry: TensorEntry) -> bool:
    """Return whether a tensor is a mask of attention, or the number that one puts in place of masked scores."""
    shape = entry.shape
    is_square = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return is_square or entry.key.endswith(".masked_bias")


def _is_under(target: str, names: Sequence[str], left_out: Sequence[str]) -> bool:
    return _depth(target, names) > _depth(target, left_out)


def _depth(target: str, names: Sequence[str]) -> int:
    """Return the length of the longest of the names that a name is or is under; -1 for none."""
    return max((len(name) for name in names if target == name or target.startswith(f"{name}.")), default=-1)


def _missing_parameters(model: PreTrainedModel, name: str) -> list[str]:
    return [f"{name}.{key}" for key, tensor in model.get_submodule(name).named_parameters() if tensor.is_meta]
