"""A trial run of a written artifact, before it is published.

All its tensors are read back and compared with those that were to be written. Then the artifact is opened as
`rocket_core.hf` opens it, and one calibration sample passes through it, one block in memory at a time: embeddings,
blocks, head. The output of each compressed layer is compared with the product of its input and the dense weight that
the tensors in the work folder compose to, which is what compression or healing made. Experts read all tokens meanwhile,
and a layer that the sample does not reach reads random numbers. Artifacts for other engines are only read back.

The tolerance is what rounding explains. For an output with the weights w and the bias b, given inputs X, the error over
all N tokens may have the norm ε (‖X‖ ‖w‖ + √N |b|). Rounding weights, inputs and sums to the dtype that computes moves
it by about a unit of the last place of that, and ε is 8 of these. In float32 it is 2⁻¹³, a thousand of them, because
two factors are rounded in proportion to themselves, and may be much larger than their product. What is lost or mixed up
costs far more: an input of d with another code moves an output by about 1/d of that norm.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import WeightLoader, open_checkpoint
from rocket_core.engines import ExportKind
from rocket_core.errors import CompressionCancelledError, FaultyResultError, ResourceError
from rocket_core.experts import visiting
from rocket_core.hf import RocketConfig, RocketHfQuantizer
from rocket_core.layers import StoredLinear
from rocket_core.layers.scaled_embedding import embedding_scale
from rocket_core.models.architecture import build_architecture
from rocket_core.models.pretrained import load_config
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.export import check_weights
from rocket_core.pipeline.stages.stored_weight import read_dense_weight
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerReport

_FLOAT32_TOLERANCE = 2.0**-13
_LAST_PLACES = 8
# The others are for engines that are not among the dependencies.
_RUN_HERE = ("factored", "dense")
# Tokens that the head reads: logits of all would take more memory than a block.
_HEAD_TOKENS = 64


def check_export(
    run: Run,
    work: WorkFolder,
    kind: ExportKind,
    folder: Path,
    layers: Mapping[str, LayerReport],
    inputs: CalibrationInputs,
    monitor: Monitor,
) -> None:
    """Raise an error if an artifact holds, or its layers compute, something else than what compression made.

    Args:
        run: the run.
        work: work folder with the tensors of the compressed layers. A faulty artifact is no longer finished in it.
        kind: kind of the artifact.
        folder: its folder.
        layers: every compressible layer and table by name.
        inputs: calibration samples, of which the first is run.
        monitor: notified of every tensor, batch and layer.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
        FaultyResultError: the artifact is faulty.
    """
    dtype = run.dtype if kind == "dense" else run.compute_dtype
    expected = _Expected(run=run, work=work, layers=layers, dtype=dtype, on_layer=monitor.pulse)
    try:
        check_weights(run, work, kind, folder, layers, monitor)
        if kind in _RUN_HERE:
            _run_sample(_opened(run, folder), expected, inputs, monitor)
    except (CompressionCancelledError, ResourceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        work.new_export(kind)
        fault = str(error) if isinstance(error, FaultyResultError) else f"it cannot be run: {error}"
        raise FaultyResultError(
            f"the written result ({kind}) is faulty: {fault}; neither the model nor the settings are at fault, and "
            "finished layers are kept: resume the run, which writes the result again, and if that fails again, check "
            "the disk and report it"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expected:
    """What the compressed layers of a run should compute.

    Attributes:
        run: the run.
        work: work folder with their tensors.
        layers: every compressible layer and table by name.
        dtype: dtype of their dense weights in the artifact.
        on_layer: called before each comparison.
        seen: names of the layers that have been compared.
    """

    run: Run
    work: WorkFolder
    layers: Mapping[str, LayerReport]
    dtype: torch.dtype
    on_layer: Callable[[], None]
    seen: set[str] = field(default_factory=set)

    def stored(self, name: str) -> LayerReport | None:
        """Return the layer whose weight a module has, in another form than dense; None if it has none."""
        table = next((table.name for table in self.run.tables if name in table.modules), name)
        layer = self.layers.get(table)
        return None if layer is None or layer.kind == "dense" else layer

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Compare the outputs of all compressed layers among some modules while the context is active."""
        with ExitStack() as stack:
            for name, module in modules.items():
                layer = self.stored(name)
                if layer is not None and hasattr(module, "weight"):
                    hook = self._comparing(name, layer)
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def call_unseen(self, modules: Mapping[str, nn.Module]) -> None:
        """Call the compressed layers among watched modules that the sample did not reach, on random numbers."""
        for name, module in modules.items():
            layer = self.stored(name)
            if layer is not None and name not in self.seen:
                generator = torch.Generator().manual_seed(0)
                rows = torch.randn(_HEAD_TOKENS, layer.d_in, generator=generator)
                module(rows.to(self.run.device, self.run.compute_dtype))

    def _comparing(self, name: str, layer: LayerReport) -> Callable[..., None]:
        def compare(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], output: Tensor) -> None:
            self.on_layer()
            self.seen.add(name)
            read = args[0] if args else next(iter(kwargs.values()))
            with torch.no_grad():
                self._compare(name, layer, module, read, output)

        return compare

    def _compare(self, name: str, layer: LayerReport, module: nn.Module, read: Tensor, output: Tensor) -> None:
        exact = torch.promote_types(output.dtype, torch.float32)
        weight = self._weight(layer).to(output.device, exact)
        rows = output.flatten(0, -2).to(exact)
        if isinstance(module, nn.Embedding):
            stock = self.run.architecture.model.get_submodule(name)
            expected = weight[read.flatten().to(weight.device)] * (embedding_scale(stock) or 1.0)
            error, size = (rows - expected).norm(dim=1), expected.norm(dim=1)
        else:
            bias = torch.zeros(len(weight)).to(weight) if module.bias is None else module.bias.detach().to(exact)
            inputs = read.flatten(0, -2).to(exact)
            error = (rows - (inputs @ weight.mT + bias)).norm(dim=0)
            size = inputs.norm() * weight.norm(dim=1) + len(inputs) ** 0.5 * bias.abs()
        faulty = int((~(error <= _tolerance(output.dtype) * size)).sum())
        if faulty:
            raise FaultyResultError(
                f"{faulty} of {len(error)} outputs of {name!r} differ from those of the compressed weight by more than "
                f"rounding, in all by {float(error.norm() / size.norm()):.1e} of their bound"
            )

    def _weight(self, layer: LayerReport) -> Tensor:
        return read_dense_weight(
            self.work,
            layer.name,
            (layer.d_in, layer.d_out),
            rank=layer.rank,
            dictionary_owner=layer.dictionary,
            dtype=self.dtype,
        )


def _tolerance(dtype: torch.dtype) -> float:
    return max(_LAST_PLACES * torch.finfo(dtype).eps, _FLOAT32_TOLERANCE)


def _opened(run: Run, folder: Path) -> Run:
    """Return the run with an artifact in place of the original model."""
    config = load_config(folder)
    table = vars(config).pop("quantization_config", None)
    architecture = build_architecture(config, run.compute_dtype, vision=run.config.includes_vision)
    checkpoint = open_checkpoint(folder)
    if table is not None:
        quantizer = RocketHfQuantizer(RocketConfig(**table), pre_quantized=True)
        files = [str(file) for file in checkpoint.files]
        quantizer._process_model_before_weight_loading(architecture.model, checkpoint_files=files)
    loader = WeightLoader(architecture.model, checkpoint, run.device)
    return replace(run, architecture=architecture, checkpoint=checkpoint, loader=loader)


def _run_sample(artifact: Run, expected: _Expected, inputs: CalibrationInputs, monitor: Monitor) -> None:
    architecture = artifact.architecture
    walk = BlockWalk(artifact, inputs[:1], monitor.pulse)
    model = architecture.model
    tables = {name: model.get_submodule(name) for table in artifact.tables for name in table.embeddings}
    with expected.watching(tables):
        for index in range(len(architecture.layers)):
            _try_block(walk, index, f"{architecture.block_name(index)}.", expected)
        _try_head(artifact, walk, expected)


def _try_block(walk: BlockWalk, index: int, prefix: str, expected: _Expected) -> None:
    modules: dict[str, nn.Module] = {}
    with ExitStack() as stack:

        def ready(block: nn.Module) -> nn.Module:
            copied = _as_deployed(block)
            modules.update({f"{prefix}{name}": module for name, module in copied.named_modules()})
            stack.enter_context(visiting(copied, "all"))
            stack.enter_context(expected.watching(modules))
            return copied

        walk.pass_through(index, ready)
        expected.call_unseen(modules)


def _as_deployed(block: nn.Module) -> nn.Module:
    """Return a copy of a block in the form in which it is deployed."""
    # A copy, as the form takes memory that unloading the block would not free.
    copied = copy.deepcopy(block)
    for module in copied.modules():
        if isinstance(module, StoredLinear):
            module.prepare_()
    return copied


def _try_head(artifact: Run, walk: BlockWalk, expected: _Expected) -> None:
    model = artifact.architecture.model
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if head is None or name is None:
        return
    with walk.head_inputs(name) as batches:
        rows = next(batches, None)
    if rows is None:
        return
    owners = {name, *(table.name for table in artifact.tables if name in table.modules)}
    artifact.loader.load(owners)
    with expected.watching({name: head}):
        logits = head(rows.flatten(0, -2)[:_HEAD_TOKENS])
    for owner in owners:
        artifact.loader.unload(model.get_submodule(owner))
    if not bool(logits.isfinite().all()):
        raise FaultyResultError("it predicts numbers that are not finite")
