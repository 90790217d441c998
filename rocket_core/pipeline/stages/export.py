"""Export of the artifacts: safetensors tensor by tensor, config and tokenizer files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, assert_never

import torch
from transformers.pytorch_utils import Conv1D

from rocket_core.checkpoint import (
    PartEntry,
    TensorEntry,
    TensorPlan,
    plan_copy,
    plan_tensor,
    write_checkpoint,
)
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.engines import ExportKind
from rocket_core.errors import FaultyResultError
from rocket_core.exports import artifact_folder, block_tensors, compressed_tensors, mlx, olive
from rocket_core.exports.gguf_writer import GgufSource, gguf_storage, modelfile, write_model
from rocket_core.layers import LayerEntry, quantization_config
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.stored_weight import (
    read_codes,
    read_layer_weight,
    stored_blocks,
    stored_tensors,
    trained_entries,
)
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.loading import LoadingReport
from rocket_core.report.run_commands import GGUF_NAME, MODELFILE_NAME
from rocket_core.report.schema import ExportReport, LayerReport
from rocket_core.sizes.block_types import BlockType
from rocket_core.sizes.code_format import CodeFormat
from rocket_core.system.files import DifferentContentError, Opener, atomic_write, compared

StoredExport = Literal["rocket", "dense", "compressed-tensors", "mlx", "olive"]
"""Exports of safetensors."""


def write_export(
    run: Run, work: WorkFolder, kind: ExportKind, layers: Mapping[str, LayerReport], monitor: Monitor
) -> Path:
    """Write one artifact, without its card and report, into the work folder, unless it is already finished there.

    Args:
        run: the run.
        work: work folder with the factors, to which the artifact is written.
        kind: `rocket` (every layer as it is stored; smaller, loads with rocket_core.hf), `dense` (stock names and
            shapes) or a format of another engine.
        layers: every compressible layer by name.
        monitor: notified of every tensor.

    Returns:
        The artifact's folder.
    """
    finished = work.finished_export(kind)
    if finished is not None:
        return finished
    folder, stored = work.new_export(kind), stored_layers(run, layers)
    _write_weights(run, work, kind, folder, stored, lambda share, key: monitor.step(_share(run, kind, share), key))
    if kind != "gguf":
        _write_description(run, work, folder, kind, stored)
    work.finish_export(kind)
    return folder


def check_weights(
    run: Run, work: WorkFolder, kind: ExportKind, folder: Path, layers: Mapping[str, LayerReport], monitor: Monitor
) -> None:
    """Raise an error if the files of a written artifact hold other tensors than those that were written.

    Args:
        run: the run.
        work: work folder with the factors.
        kind: kind of the artifact.
        folder: the artifact's folder.
        layers: every compressible layer by name.
        monitor: notified of every tensor.

    Raises:
        FaultyResultError: they do; the message names a tensor.
    """
    last = ["the header"]

    def on_tensor(_share: float, key: str) -> None:
        last[0] = f"tensor {key!r}"
        monitor.pulse()

    try:
        _write_weights(run, work, kind, folder, stored_layers(run, layers), on_tensor, opener=compared)
    except DifferentContentError as error:
        raise FaultyResultError(f"{error}, at {last[0]}") from error


def _write_weights(
    run: Run,
    work: WorkFolder,
    kind: ExportKind,
    folder: Path,
    stored: Mapping[str, LayerReport],
    on_tensor: Callable[[float, str], None],
    *,
    opener: Opener = atomic_write,
) -> None:
    """Write the files with the tensors of an artifact; `on_tensor` gets the completed part and the next name."""
    if kind == "gguf":
        _write_gguf(run, work, folder, stored, on_tensor, opener)
        return
    plans = _plans(run, work, kind, stored)
    tensors = iter(range(len(plans)))
    write_checkpoint(
        folder,
        plans,
        max_shard_bytes=run.config.max_shard_bytes,
        on_tensor=lambda key: on_tensor(next(tensors) / len(plans), key),
        opener=opener,
    )


def _share(run: Run, kind: ExportKind, share: float) -> float:
    """Return the completed part of all exports."""
    kinds = run.config.export
    return (kinds.index(kind) + share) / len(kinds)


def write_unhealed(
    run: Run, work: WorkFolder, layers: Mapping[str, LayerReport], *, on_tensor: Callable[[str], None]
) -> Path:
    """Write the `rocket` artifact as it is before healing, into temporary files of this process.

    Args:
        run: the run.
        work: work folder with the factors.
        layers: every compressible layer by name.
        on_tensor: called with each name before it is written.

    Returns:
        The artifact's folder.
    """
    folder, stored = work.new_scratch(), stored_layers(run, layers)
    plans = _plans(run, work, "rocket", stored)
    write_checkpoint(folder, plans, max_shard_bytes=run.config.max_shard_bytes, on_tensor=on_tensor)
    _write_description(run, work, folder, "rocket", stored)
    return folder


def stored_layers(run: Run, layers: Mapping[str, LayerReport]) -> dict[str, LayerReport]:
    """Return the layers that are not dense by their names in the files."""
    return {run.disk_name(name): layer for name, layer in layers.items() if layer.kind != "dense"}


def _write_description(
    run: Run, work: WorkFolder, folder: Path, kind: StoredExport, stored: Mapping[str, LayerReport]
) -> None:
    """Write everything in a folder with safetensors that tells how to load them."""
    _write_config(run, folder, _quantization(run, work, kind, stored))
    artifact_folder.copy_companions(run.source.folder, run.source.name, folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """What a tensor of the checkpoint becomes in an artifact of safetensors.

    Attributes:
        entry: the tensor, of which those of all experts may be split.
        plans: the tensors of the artifact.
        is_compressed: whether it is the weight of a layer that does not stay dense, or holds such weights.
    """

    entry: TensorEntry
    plans: Sequence[TensorPlan]
    is_compressed: bool


def planned_tensors(
    run: Run, work: WorkFolder, kind: StoredExport, stored: Mapping[str, LayerReport]
) -> Iterator[PlannedTensor]:
    """Yield what becomes of each tensor, given the layers that are not dense by their names in the files."""
    split = kind == "rocket"
    entries = run.artifact_entries(layer.name for layer in stored.values()) if split else run.checkpoint.entries
    trained = trained_entries(work)
    for key, entry in entries.items():
        layer = stored.get(key.removesuffix(".weight")) if key.endswith(".weight") else None
        parts = {} if split else run.loader.parts(key)
        experts = [
            (part, stored[stem]) for name, part in parts.items() if (stem := name.removesuffix(".weight")) in stored
        ]
        if layer is not None:
            plans = list(_plan_layer(run, work, kind, layer, entry))
        elif experts:
            plans = [_plan_experts(run, work, entry, experts)]
        else:
            plans = [plan_untouched(run, trained.get(key, entry))]
        yield PlannedTensor(entry=entry, plans=plans, is_compressed=layer is not None or bool(experts))


def _plans(run: Run, work: WorkFolder, kind: StoredExport, stored: Mapping[str, LayerReport]) -> list[TensorPlan]:
    return [plan for planned in planned_tensors(run, work, kind, stored) for plan in planned.plans]


def export_reports(
    folders: Mapping[ExportKind, Path], loaded: Mapping[ExportKind, LoadingReport | None] = MappingProxyType({})
) -> tuple[ExportReport, ...]:
    """Return the reports on written artifacts, given what their engines made of them."""
    return tuple(
        ExportReport(kind=kind, folder=kind, stored_bytes=stored_bytes(folder), loading=loaded.get(kind))
        for kind, folder in folders.items()
    )


def stored_bytes(folder: Path) -> int:
    """Return the bytes of all safetensors of an artifact, or of its GGUF file."""
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in folder.glob(pattern))


def plan_untouched(run: Run, entry: TensorEntry) -> TensorPlan:
    """Plan a tensor that compression leaves alone: a copy, unless another dtype is configured."""
    dtype = DTYPES.get(entry.dtype)
    if run.config.dtype == "auto" or dtype is None or not dtype.is_floating_point or dtype == run.dtype:
        return plan_copy(entry)
    return plan_tensor(entry.key, run.dtype, entry.shape, entry.read)


def gguf_sources(run: Run, work: WorkFolder, stored: Mapping[str, LayerReport]) -> list[GgufSource]:
    """Return the tensors that a GGUF file is written from, given the layers that are not dense by their names."""
    sources = []
    trained = trained_entries(work)
    for key, untouched in run.split_entries().items():
        entry = trained.get(key, untouched)
        layer = stored.get(key.removesuffix(".weight")) if key.endswith(".weight") else None
        blocks = None if layer is None else stored_blocks(work, layer.name)
        storage, read = (gguf_storage(run.dtype), entry.read) if blocks is None else (blocks[0], blocks[1].read)
        sources.append(GgufSource(key=key, shape=tuple(entry.shape), storage=storage, read=read))
    return sources


def _write_gguf(
    run: Run,
    work: WorkFolder,
    folder: Path,
    stored: Mapping[str, LayerReport],
    on_tensor: Callable[[float, str], None],
    opener: Opener,
) -> None:
    assert run.gguf is not None, "the settings have the export"
    sources = gguf_sources(run, work, stored)
    tensors, count = iter(range(len(sources))), len(sources)
    write_model(
        folder / GGUF_NAME,
        run.gguf,
        sources,
        on_tensor=lambda key: on_tensor(next(tensors) / count, key),
        opener=opener,
    )
    with opener(folder / MODELFILE_NAME) as stream:
        stream.write(modelfile(run.gguf).encode())


def _plan_layer(
    run: Run, work: WorkFolder, kind: StoredExport, layer: LayerReport, entry: TensorEntry
) -> Iterable[TensorPlan]:
    base, shape = entry.key.removesuffix("weight"), (layer.d_in, layer.d_out)
    match kind:
        case "rocket":
            return _plan_stored(work, layer.name, entry.key)
        case "dense":
            return [_plan_composed(run, work, layer, entry)]
        case "compressed-tensors":
            floats = stored_blocks(work, layer.name)
            if floats is not None:
                return block_tensors.plan_layer(base, shape, floats[0], run.dtype, floats[1].read)
            return compressed_tensors.plan_layer(
                base, shape, _code_format(work, layer.name), run.dtype, lambda: read_codes(work, layer.name, shape)
            )
        case "olive":
            return olive.plan_layer(
                base, shape, _code_format(work, layer.name), run.dtype, lambda: read_codes(work, layer.name, shape)
            )
        case "mlx":
            block_type, blocks = _blocks(work, layer.name)
            return mlx.plan_layer(base, shape, block_type, blocks.read)
        case _:
            assert_never(kind)


def _quantization(run: Run, work: WorkFolder, kind: StoredExport, stored: Mapping[str, LayerReport]) -> dict[str, Any]:
    """Return what is added to `config.json`, by the name of the setting; nothing for a model that loads without.

    Args:
        run: the run.
        work: work folder with the factors.
        kind: the export.
        stored: every layer that is not dense by its name in the files.
    """
    table: dict[str, Any] | None = None
    match kind:
        case "rocket":
            table = quantization_config({disk: _table_entry(run, work, layer) for disk, layer in stored.items()})
        case "dense":
            pass
        case "mlx":
            return mlx.model_settings({disk: _blocks(work, layer.name)[0] for disk, layer in stored.items()})
        case "compressed-tensors":
            formats = {
                layer.name: (layer.block_type or _code_format(work, layer.name), layer.d_in)
                for layer in stored.values()
            }
            table = compressed_tensors.model_config(run.architecture.model, formats, run.disk_name)
        case "olive":
            table = olive.quantization_config({disk: _code_format(work, layer.name) for disk, layer in stored.items()})
        case _:
            assert_never(kind)
    return {} if table is None else {"quantization_config": table}


def _blocks(work: WorkFolder, name: str) -> tuple[BlockType, TensorEntry]:
    blocks = stored_blocks(work, name)
    assert blocks is not None, name
    return blocks


def _code_format(work: WorkFolder, name: str) -> CodeFormat:
    codes = work.codes(name)
    assert codes is not None, name
    return codes.code_format


def _plan_stored(work: WorkFolder, name: str, key: str) -> Iterator[TensorPlan]:
    base = key.removesuffix("weight")
    return (plan_copy(entry, key=base + part) for part, entry in stored_tensors(work, name).items())


def _plan_composed(run: Run, work: WorkFolder, layer: LayerReport, entry: TensorEntry) -> TensorPlan:
    def make() -> torch.Tensor:
        weight = read_layer_weight(work, layer, run.dtype)
        module = run.architecture.model.get_submodule(layer.name)
        return weight.T if type(module) is Conv1D else weight

    return plan_tensor(entry.key, run.dtype, entry.shape, make)


def _plan_experts(
    run: Run, work: WorkFolder, entry: TensorEntry, layers: Sequence[tuple[PartEntry, LayerReport]]
) -> TensorPlan:
    """Plan a tensor of all experts of a block, some of whose parts are weights of stored layers."""

    def make() -> torch.Tensor:
        fused = entry.read().to(run.dtype)
        for stored, layer in layers:
            stored.part.of(fused.view(-1, *stored.expert.shape)).copy_(read_layer_weight(work, layer, run.dtype))
        return fused

    return plan_tensor(entry.key, run.dtype, entry.shape, make)


def _dictionary_owner(layer: LayerReport) -> str | None:
    """Return the other layer whose dictionary this one uses; None if it has its own, or does not have one."""
    return None if layer.dictionary == layer.name else layer.dictionary


def _table_entry(run: Run, work: WorkFolder, layer: LayerReport) -> LayerEntry:
    codes = work.codes(layer.name)
    owner = _dictionary_owner(layer)
    if codes is not None:
        if owner is None:
            return codes
        return LayerEntry(**(codes.model_dump() | {"dictionary": run.disk_name(owner)}))
    (nnz,) = stored_tensors(work, layer.name)["weight"].shape
    return LayerEntry(rank=layer.rank, nnz=nnz, dictionary=None if owner is None else run.disk_name(owner))


def _write_config(run: Run, folder: Path, quantization: dict[str, Any]) -> None:
    settings = artifact_folder.read_settings(run.source.folder)
    is_coded = settings.pop("quantization_config", None) is not None
    if run.config.dtype != "auto" or is_coded:
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(run.dtype).removeprefix("torch.")
    artifact_folder.write_settings(folder, settings, quantization)
