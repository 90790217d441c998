"""Writing the artifacts: safetensors tensor by tensor, config, tokenizer files, card and report."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers.pytorch_utils import Conv1D

from rocket_core.checkpoint import TensorEntry, TensorPlan, plan_copy, plan_tensor, write_atomically, write_checkpoint
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.config import ExportKind
from rocket_core.modules import FORMAT_VERSION, QUANT_METHOD, compose_weight, unpack_coefficients
from rocket_core.pipeline.preflight import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.work_folder import WorkFolder
from rocket_core.report import LayerReport

# What a model needs beside its weights; everything else in the source folder is none of the artifact's business.
_COPIED = (
    # Of sentence-transformers: what is done behind the model, each step in a folder of its own.
    "[0-9]*_*/config.json",
    "[0-9]*_*/model.safetensors",
    "added_tokens.json",
    "chat_template*",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_*_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab.*",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)


def write_export(
    run: Run, work: WorkFolder, kind: ExportKind, layers: Mapping[str, LayerReport], monitor: Monitor
) -> Path:
    """Writes one artifact without its card and report into the work folder.

    Args:
        run: the run.
        work: where the factors are, and the artifact goes.
        kind: `factored` (smaller, loads with rocket_core.hf) or `dense` (stock names and shapes).
        layers: every compressible layer by name.
        monitor: told of every tensor.

    Returns:
        The artifact's folder.
    """
    folder = work.new_export(kind)
    factored = {name: layer for name, layer in layers.items() if layer.kind == "factored"}
    names = {run.disk_name(name): name for name in factored}
    kinds = run.config.export
    begin, total = kinds.index(kind), len(kinds)
    plans: list[TensorPlan] = []
    for key, entry in run.checkpoint.entries.items():
        name = names.get(key.removesuffix(".weight")) if key.endswith(".weight") else None
        if name is None:
            plans.append(_plan_untouched(run, entry))
        elif kind == "factored":
            plans += _plan_factored(work, name, key)
        else:
            plans.append(_plan_composed(run, work, factored[name], entry))
    tensors = iter(range(len(plans)))
    write_checkpoint(
        folder,
        plans,
        max_shard_bytes=run.config.max_shard_bytes,
        on_tensor=lambda key: monitor.step((begin + next(tensors) / len(plans)) / total, key),
    )
    table = {disk: factored[name] for disk, name in names.items()} if kind == "factored" else None
    _write_config(run, folder, table)
    for file in _companions(run.source.folder):
        copy = folder / file.relative_to(run.source.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    return folder


def stored_bytes(folder: Path) -> int:
    """Size of all safetensors of an artifact."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _plan_untouched(run: Run, entry: TensorEntry) -> TensorPlan:
    dtype = DTYPES.get(entry.dtype)
    if run.config.dtype == "auto" or dtype is None or not dtype.is_floating_point or dtype == run.dtype:
        return plan_copy(entry)
    return plan_tensor(entry.key, run.dtype, entry.shape, entry.read)


def _plan_factored(work: WorkFolder, name: str, key: str) -> Iterator[TensorPlan]:
    base = key.removesuffix("weight")
    entries = work.factors(name)
    assert entries is not None, name
    return (plan_copy(entry, key=base + part) for part, entry in entries.items())


def _plan_composed(run: Run, work: WorkFolder, layer: LayerReport, entry: TensorEntry) -> TensorPlan:
    def make() -> torch.Tensor:
        entries = work.factors(layer.name)
        assert entries is not None
        assert layer.rank is not None
        tensors = {part: stored.read() for part, stored in entries.items()}
        coefficients = unpack_coefficients(
            tensors["weight"], tensors.get("weight_mask"), layer.rank, layer.d_out, layer=layer.name
        )
        weight = compose_weight(tensors["weight_u"].T, coefficients, run.dtype)
        module = run.architecture.model.get_submodule(layer.name)
        return weight.T if type(module) is Conv1D else weight

    return plan_tensor(entry.key, run.dtype, entry.shape, make)


def _write_config(run: Run, folder: Path, table: dict[str, LayerReport] | None) -> None:
    config = json.loads((run.source.folder / "config.json").read_text(encoding="utf-8"))
    if run.config.dtype != "auto":
        config.pop("torch_dtype", None)
        config["dtype"] = run.config.dtype
    if table is not None:
        config["quantization_config"] = {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "layers": {disk: {"rank": layer.rank, "nnz": layer.nnz} for disk, layer in table.items()},
        }
    with write_atomically(folder / "config.json") as stream:
        stream.write((json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def _companions(folder: Path) -> list[Path]:
    return sorted({file for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()})
