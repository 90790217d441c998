"""A run of an export by the engine that it is made for, if that is installed, right after it was written.

The engine continues a text greedily, in a process that ends with the run. The same tokens then pass through the model
with the weights that the export stores, one block in memory at a time, and both predictions are compared.
"""

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, ModuleType

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from rocket_core.calibration.datasets import held_out_text
from rocket_core.checkpoint import WeightLoader
from rocket_core.engines import ExportKind
from rocket_core.models.pretrained import load_tokenizer, tokenize
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.export import stored_bytes
from rocket_core.pipeline.stages.stored_weight import read_layer_weight, trained_entries
from rocket_core.pipeline.stages.trial_run import RUN_HERE
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.formatting import bytes_text
from rocket_core.report.loading import LoadingReport
from rocket_core.report.run_commands import GGUF_NAME
from rocket_core.report.schema import LayerReport
from rocket_core.speed import llama_cpp_runtime, mlx_runtime
from rocket_core.speed.child import Child
from rocket_core.speed.messages import Continue, Continued, Likeliest, Load, Loaded
from rocket_core.speed.subjects import Subject
from rocket_core.system.child_process import ChildError
from rocket_core.system.machine import free_machine_memory

# By export: the engine's name, and what loads it.
_ENGINES: Mapping[ExportKind, tuple[str, ModuleType]] = MappingProxyType(
    {"gguf": ("llama.cpp", llama_cpp_runtime), "mlx": ("MLX", mlx_runtime)}
)
_PROMPT_TOKENS = 32
_NEW_TOKENS = 20
_TEXT_CHARACTERS = 400
_LEAST_REST = 1e-9
# What engines take next to weights for a short context, and the interpreter.
_RUNTIME_BYTES = 2**28


def run_export(
    run: Run, work: WorkFolder, kind: ExportKind, folder: Path, layers: Mapping[str, LayerReport], monitor: Monitor
) -> LoadingReport | None:
    """Load an export in its engine, let it generate, and compare its predictions with those of the weights.

    Args:
        run: the run.
        work: work folder with the tensors of the compressed layers.
        kind: kind of the export.
        folder: its folder.
        layers: every compressible layer and table by name.
        monitor: notified of every block; checked while the engine runs.

    Returns:
        What happened; None for exports whose engine is not run here. Those that `trial_run` has run need no other run.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
    """
    today = datetime.now(UTC).date()
    if kind in RUN_HERE and run.config.calibrates:
        own = f"transformers {transformers.__version__}"
        return LoadingReport(engine="Transformers (Rocket)", version=own, date=today)
    if kind not in _ENGINES:
        return None
    title, runtime = _ENGINES[kind]
    version, path = runtime.installed_version(), folder / GGUF_NAME if kind == "gguf" else folder
    outcome = LoadingReport(engine=title, version=version, date=today)
    obstacle = runtime.INSTALL if version is None else _lack_of_memory(stored_bytes(folder))
    if obstacle is not None:
        return outcome.model_copy(update={"untried": obstacle})
    tokenizer = load_tokenizer(run.source.folder, run.architecture.model.config)
    text = held_out_text()[:_TEXT_CHARACTERS]
    ids = tokenize(tokenizer, text)["input_ids"]
    try:
        prompt, answer = _continued(Subject(name=kind, path=path, form=kind, stored_bytes=0), text, ids, monitor)
    except ChildError as error:
        return outcome.model_copy(update={"fault": str(error)})
    tokens = [place.tokens[0] for place in answer.places]
    logits = _logits(run, work, layers, [*prompt, *tokens[:-1]], monitor)
    return outcome.model_copy(
        update={
            "prompt_tokens": len(prompt),
            "new_tokens": len(tokens),
            "text": str(tokenizer.decode(tokens)),
            "kl_divergence": _divergence(logits[-len(tokens) :], answer.places),
            "splits_alike": list(answer.split) == list(ids),
        }
    )


def _lack_of_memory(size: int) -> str | None:
    """Return why a file of some bytes cannot be loaded; None if it can.

    llama.cpp maps the file, and copies layers of some types in another order.
    """
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    allowed = sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - _RUNTIME_BYTES)
    free = free_machine_memory()
    available = allowed if free is None else min(allowed, free)
    return None if size <= available else f"it has {bytes_text(size)}, and {bytes_text(available)} of memory are free"


def _continued(subject: Subject, text: str, ids: Sequence[int], monitor: Monitor) -> tuple[Sequence[int], Continued]:
    """Return the prompt that the engine continued, and its answer."""
    with closing(Child({}, monitor.check, "rocket_core.speed.continuing_process")) as child:
        load = Load(
            subject=subject, device="cpu", threads=torch.get_num_threads(), context=_PROMPT_TOKENS + _NEW_TOKENS
        )
        positions = child.ask(load, Loaded).positions or _PROMPT_TOKENS + _NEW_TOKENS
        count = min(_NEW_TOKENS, max(1, positions // 2))
        prompt = ids[: max(1, min(_PROMPT_TOKENS, positions - count))]
        return prompt, child.ask(Continue(text=text, prompt=tuple(prompt), new_tokens=count), Continued)


class _StoredWeights(WeightLoader):
    """A loader that puts the weights of stored layers, and trained norms, in place of those of the original."""

    def __init__(self, run: Run, work: WorkFolder, layers: Mapping[str, LayerReport]) -> None:
        entries = run.checkpoint.entries | trained_entries(work)
        super().__init__(run.architecture.model, replace(run.checkpoint, entries=entries), run.device)
        self._run, self._work = run, work
        tables = {table.name: table.modules for table in run.tables}
        self._stored = [
            (module, layer)
            for name, layer in layers.items()
            if layer.kind != "dense"
            for module in tables.get(name, (name,))
        ]

    def load(self, modules: Iterable[str], *, without: Iterable[str] = ()) -> None:
        """See `WeightLoader`."""
        names = tuple(modules)
        super().load(names, without=without)
        inside = tuple(f"{name}." for name in names)
        for module, layer in self._stored:
            weight = self._model.get_submodule(module).weight
            assert isinstance(weight, Tensor), module
            if f"{module}.".startswith(inside) and not weight.is_meta:
                weight.copy_(self._weight(layer))

    def _weight(self, layer: LayerReport) -> Tensor:
        return read_layer_weight(self._work, layer, self._run.dtype)


def _logits(
    run: Run, work: WorkFolder, layers: Mapping[str, LayerReport], ids: Sequence[int], monitor: Monitor
) -> Float[Tensor, "tokens vocabulary"]:
    """Return the predictions after each token of a text, as the stored weights make them in `transformers`."""
    model = run.architecture.model
    stored = replace(run, loader=_StoredWeights(run, work, layers))
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    with BlockWalk(stored, torch.tensor([ids]), monitor.pulse).head_inputs(name) as batches:
        rows = next(batches).flatten(0, -2)
    stored.loader.load([name])
    with torch.no_grad():
        logits: Tensor = head(rows).double()
    stored.loader.unload(head)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


def _divergence(logits: Float[Tensor, "places vocabulary"], places: Sequence[Likeliest]) -> float:
    """Return the mean KL divergence of an engine's predictions, over its likeliest tokens and all others together."""
    own = logits.double().log_softmax(dim=-1).cpu()
    total = 0.0
    for row, place in zip(own, places, strict=True):
        log_p = _with_rest(row[list(place.tokens)])
        total += float((log_p.exp() * (log_p - _with_rest(torch.tensor(place.log_probabilities)))).sum())
    return total / len(places)


def _with_rest(log_probabilities: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens_and_rest"]:
    known = log_probabilities.double()
    rest = (1 - known.exp().sum()).clamp(min=_LEAST_REST).log()
    return torch.cat([known, rest[None]])
