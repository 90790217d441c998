"""What becomes of every tensor of the original in an artifact."""

from collections.abc import Iterator, Mapping

from rocket_core.engines import ExportKind
from rocket_core.exports.gguf_file import storage_bytes
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.stages.export import gguf_sources, planned_tensors, stored_layers
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerReport
from rocket_core.report.tensor_groups import Fate, TensorAccount, TensorGroup, grouped


def account_for_tensors(
    run: Run, work: WorkFolder, kind: ExportKind, layers: Mapping[str, LayerReport]
) -> tuple[TensorGroup, ...]:
    """Return what becomes of every tensor of the original in an artifact.

    Args:
        run: the run.
        work: work folder with the factors.
        kind: kind of the artifact.
        layers: every compressible layer by name.
    """
    stored = stored_layers(run, layers)
    accounts = _in_gguf(run, work, stored) if kind == "gguf" else _in_safetensors(run, work, kind, stored)
    unread = (
        TensorAccount(name=entry.key, fate="left out", original_bytes=entry.file_bytes, stored_bytes=0)
        for entry in run.checkpoint.left_out
    )
    return grouped([*accounts, *unread])


def _in_safetensors(
    run: Run, work: WorkFolder, kind: ExportKind, stored: Mapping[str, LayerReport]
) -> Iterator[TensorAccount]:
    assert kind != "gguf"
    for planned in planned_tensors(run, work, kind, stored):
        written = sum(plan.nbytes for plan in planned.plans)
        is_same = all(plan.dtype == planned.entry.dtype for plan in planned.plans)
        yield TensorAccount(
            name=planned.entry.key,
            fate="compressed" if planned.is_compressed else "kept" if is_same else "converted",
            original_bytes=planned.entry.file_bytes,
            stored_bytes=written,
        )


def _in_gguf(run: Run, work: WorkFolder, stored: Mapping[str, LayerReport]) -> Iterator[TensorAccount]:
    assert run.gguf is not None, "the settings have the export"
    sources = {source.key: source for source in gguf_sources(run, work, stored)}
    forms = [(source.key, source.shape, source.storage) for source in sources.values()]
    tensors = [*run.gguf.tensors(forms), *([] if run.gguf.projector is None else run.gguf.projector.tensors(forms))]
    written = {
        key: (storage_bytes(tensor.shape, tensor.storage) // len(tensor.parts), tensor.storage)
        for tensor in tensors
        for key in tensor.parts
    }
    entries = run.split_entries()
    for key in sources:
        original, (size, storage) = entries[key].file_bytes, written.get(key, (0, None))
        fate: Fate = "kept" if (size, storage) == (original, entries[key].dtype) else "converted"
        if key not in written:
            fate = "left out"
        elif key.endswith(".weight") and key.removesuffix(".weight") in stored:
            fate = "compressed"
        yield TensorAccount(name=key, fate=fate, original_bytes=original, stored_bytes=size)
    for name, values in run.gguf.computed.items():
        yield TensorAccount(name=name, fate="added", original_bytes=0, stored_bytes=4 * len(values))
