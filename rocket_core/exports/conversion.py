"""Export of a stored artifact to other formats, tensor by tensor."""

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import assert_never

import torch
from torch import Tensor

from rocket_core.checkpoint import TensorPlan, checkpoint_bytes, plan_copy, plan_tensor, write_checkpoint
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.config import CompressionConfig
from rocket_core.engines import LaterExport
from rocket_core.errors import InsufficientDiskError, InvalidConfigError
from rocket_core.experts import FusedParameter, fused_parameters
from rocket_core.exports import artifact_folder, exact_formats
from rocket_core.exports.compressed_tensors import plan_layer
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_writer import GgufSource, gguf_storage, modelfile, write_model
from rocket_core.exports.stored_artifact import StoredArtifact, open_artifact
from rocket_core.hf.names import is_merged
from rocket_core.report.run_commands import GGUF_NAME, MODELFILE_NAME
from rocket_core.report.schema import ExportReport
from rocket_core.sizes.block_types import BlockType
from rocket_core.sizes.code_format import CodeFormat
from rocket_core.system.machine import free_disk, gibibytes

_Report = Callable[[float, str], None]


def export_artifact(
    artifact: Path, output: Path, kind: LaterExport, *, on_step: _Report = lambda _share, _tensor: None
) -> ExportReport:
    """Write a stored artifact in another format, into a new folder.

    One layer is in memory at a time. The folder appears when it is complete. It has the card and the report of the
    compression, if the artifact has its report.

    Args:
        artifact: folder of the artifact.
        output: the new folder.
        kind: `dense` (stock names and shapes, as large as the original), or `gguf` or `compressed-tensors`, for which
            every layer must be exactly representable.
        on_step: called before each tensor with the finished share, [0, 1), and its name.

    Returns:
        Kind, folder and bytes of the export.

    Raises:
        InvalidConfigError: the folder exists, or the artifact is not one of this library.
        UnsupportedExportError: the format cannot hold exactly what the artifact stores.
        InsufficientDiskError: it does not fit on the disk.
        CheckpointError: files of the artifact are damaged.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidConfigError(f"{output} exists already; choose another folder, or remove it")
    opened = open_artifact(artifact)
    output.parent.mkdir(parents=True, exist_ok=True)
    # A fixed name, so that what a killed export leaves is replaced by the next.
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        stored = _write(opened, partial, kind, on_step)
        report = ExportReport(kind=kind, folder=output.name, stored_bytes=stored)
        _describe(opened, partial, report)
        partial.replace(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return report


def _write(artifact: StoredArtifact, folder: Path, kind: LaterExport, on_step: _Report) -> int:
    match kind:
        case "dense":
            plans, quantization = list(plan_dense(artifact)), None
        case "compressed-tensors":
            exact_formats.check_readable(artifact, "vllm")
            formats = exact_formats.code_formats(artifact)
            plans = list(_coded_plans(artifact, lambda name: _plan_coded(artifact, name, formats[name])))
            quantization = exact_formats.compressed_tensors_config(artifact, formats)
        case "gguf":
            exact_formats.check_readable(artifact, "llama.cpp")
            return _write_gguf(artifact, folder, on_step)
        case _:
            assert_never(kind)
    largest = CompressionConfig().max_shard_bytes
    _check_disk(checkpoint_bytes(plans, largest), folder)
    artifact_folder.write_settings(
        folder, artifact.settings, {} if quantization is None else {"quantization_config": quantization}
    )
    artifact_folder.copy_companions(artifact.folder, artifact.folder.name, folder)
    count = iter(range(len(plans)))
    return write_checkpoint(
        folder, plans, max_shard_bytes=largest, on_tensor=lambda key: on_step(next(count) / len(plans), key)
    )


def _check_disk(needed: int, folder: Path) -> None:
    if needed > free_disk(folder):
        raise InsufficientDiskError(
            f"the export takes {gibibytes(needed)} of disk in {folder.parent}, {gibibytes(free_disk(folder))} are free"
        )


def plan_dense(
    artifact: StoredArtifact, planned: Mapping[str, Callable[[], Iterable[TensorPlan]]] = MappingProxyType({})
) -> Iterator[TensorPlan]:
    """Plan the tensors of the whole model, with stock names and shapes.

    Args:
        artifact: the artifact.
        planned: plans other tensors for some stored layers, which belong to no expert.
    """
    fused = _fused_experts(artifact)
    inner = {part for parameter in fused.values() for part in parameter.parts}

    def plan(name: str) -> Iterable[TensorPlan]:
        if name in planned:
            return planned[name]()
        if f"{name}.weight" in inner:
            return []
        make = functools.partial(artifact.dense_weight, name)
        return [plan_tensor(f"{name}.weight", artifact.dtype, artifact.stock_shape(name), make)]

    yield from _coded_plans(artifact, plan, left_out=inner)
    for name, parameter in fused.items():
        yield plan_tensor(name, artifact.dtype, parameter.shape, functools.partial(_fuse, artifact, parameter))


def _coded_plans(
    artifact: StoredArtifact, plan_stored: Callable[[str], Iterable[TensorPlan]], *, left_out: Iterable[str] = ()
) -> Iterator[TensorPlan]:
    """Yield copies of the tensors that belong to no stored layer, and for each of these what `plan_stored` returns."""
    seen, excluded = set[str](), frozenset(left_out)
    for key, entry in artifact.checkpoint.entries.items():
        name = artifact.stored_by(key)
        if name is None and key not in excluded:
            yield plan_copy(entry)
        elif name is not None and name not in seen:
            seen.add(name)
            yield from plan_stored(name)


def _plan_coded(artifact: StoredArtifact, name: str, code_format: CodeFormat) -> Iterator[TensorPlan]:
    read = functools.partial(artifact.codes, name)
    return plan_layer(f"{name}.", artifact.shape(name), code_format, artifact.dtype, read)


def _fused_experts(artifact: StoredArtifact) -> Mapping[str, FusedParameter]:
    """Return the parameters of all experts that the files hold in parts, which transformers would not merge itself."""
    entries = artifact.checkpoint.entries
    return {
        name: parameter
        for name, parameter in fused_parameters(artifact.model).items()
        if all(part in entries and not is_merged(artifact.model, part) for part in parameter.parts)
    }


def _fuse(artifact: StoredArtifact, parameter: FusedParameter) -> Tensor:
    fused = torch.empty(parameter.by_expert, dtype=artifact.dtype)
    for key, part in parameter.parts.items():
        name = artifact.stored_by(key)
        tensor = artifact.checkpoint.entries[key].read() if name is None else artifact.dense_weight(name)
        part.of(fused).copy_(tensor)
    return fused.view(parameter.shape)


def _write_gguf(artifact: StoredArtifact, folder: Path, on_step: _Report) -> int:
    # With what transformers adds to the settings of a text model or tower.
    config = artifact.model.config.to_dict() | {"architectures": [type(artifact.model).__name__]}
    config.pop("quantization_config", None)
    plan = plan_gguf(config, artifact.folder)
    types = exact_formats.block_types(artifact)
    sources = list(_gguf_sources(artifact, types))
    _check_disk(plan.file_bytes((one.key, one.shape, one.storage) for one in sources), folder)
    count = iter(range(len(sources) + len(plan.computed)))
    size = write_model(
        folder / GGUF_NAME, plan, sources, on_tensor=lambda name: on_step(next(count) / len(sources), name)
    )
    (folder / MODELFILE_NAME).write_text(modelfile(plan), encoding="utf-8")
    return size


def _gguf_sources(artifact: StoredArtifact, types: Mapping[str, BlockType]) -> Iterator[GgufSource]:
    for key, entry in artifact.checkpoint.entries.items():
        name = artifact.stored_by(key)
        if name is None:
            storage = gguf_storage(DTYPES[entry.dtype])
            yield GgufSource(key=key, shape=tuple(entry.shape), storage=storage, read=entry.read)
        elif key == f"{name}.weight":
            read = functools.partial(exact_formats.blocks, artifact, name, types[name])
            yield GgufSource(key=key, shape=artifact.stock_shape(name), storage=types[name], read=read)


def _describe(artifact: StoredArtifact, folder: Path, export: ExportReport) -> None:
    report = artifact_folder.read_report(artifact.folder)
    if report is not None:
        others = tuple(other for other in report.exports if other.kind != export.kind)
        described = report.model_copy(update={"exports": (*others, export)})
        artifact_folder.write_description(folder, described, export.kind, artifact.folder)
