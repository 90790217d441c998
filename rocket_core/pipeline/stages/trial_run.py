"""A trial run of a written artifact, before it is published.

All its tensors are read back and compared with those that were to be written. Then the artifact is opened as
`rocket_core.hf` opens it, and one calibration sample passes through it, one block in memory at a time: embeddings,
blocks, head. The output of each compressed layer is compared with the product of its input and the dense weight that
the tensors in the work folder compose to, which is what compression or healing made. Experts read all tokens meanwhile,
and a layer that the sample does not reach reads random numbers. Artifacts for other engines are only read back;
`engine_run` runs them.

The tolerance is what rounding explains. Rounding each product of an input x_ni and a weight w_ij by about a unit of the
last place u moves an output by u √Σ_i (x_ni w_ij)², as these errors are independent, and rounding the sum by u |y_nj|.
So the error of output j over all tokens may have the norm ε (√Σ_ni (x_ni w_ij)² + ‖y_j‖), where ε is 8 u of the dtype
that computes. In float32 it is 2⁻¹³, a thousand u, because two factors are rounded in proportion to themselves, and may
be much larger than their product; it is still far less than what a wrong code or scale costs.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import Checkpoint, WeightLoader, open_checkpoint
from rocket_core.engines import ExportKind
from rocket_core.errors import FaultyResultError
from rocket_core.experts import visiting
from rocket_core.hf import RocketConfig, RocketHfQuantizer
from rocket_core.layers import StoredLinear, TiedLinear
from rocket_core.layers.scaled_embedding import embedding_scale
from rocket_core.models.architecture import build_architecture
from rocket_core.models.pretrained import load_config
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.result_faults import naming_faults
from rocket_core.pipeline.stages.export import check_weights
from rocket_core.pipeline.stages.stored_weight import read_layer_weight
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerReport

_FLOAT32_TOLERANCE = 2.0**-13
_LAST_PLACES = 8
# Tokens that the head reads, as logits of all would take more memory than a block; and rows of random numbers.
_FEW_TOKENS = 64

RUN_HERE: tuple[ExportKind, ...] = ("rocket", "dense")
"""Exports that are run; the others are for engines that are not among the dependencies."""


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
        inputs: calibration samples, of which the first is run; without calibration, tensors are only read back.
        monitor: notified of every tensor, batch and layer.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
        FaultyResultError: the artifact is faulty.
    """
    dtype = run.dtype if kind == "dense" else run.compute_dtype
    expected = _Expected(run=run, work=work, layers=layers, dtype=dtype, on_layer=monitor.pulse)
    with naming_faults(kind, discard=partial(work.new_export, kind)):
        check_weights(run, work, kind, folder, layers, monitor)
        if kind in RUN_HERE and run.config.calibrates:
            _run_sample(_opened(run, folder), expected, inputs, monitor)


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

    @contextmanager
    def watching_block(self, prefix: str, block: nn.Module) -> Iterator[None]:
        """Compare the outputs of all compressed layers of a block that runs while the context is active.

        Those that it does not reach read random numbers afterwards.
        """
        modules = {f"{prefix}{name}": module for name, module in block.named_modules()}
        with visiting(block, "all"), self.watching(modules):
            yield
            for name, module in modules.items():
                layer = self.stored(name)
                if layer is not None and name not in self.seen:
                    rows = torch.randn(_FEW_TOKENS, layer.d_in, generator=torch.Generator().manual_seed(0))
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
            inputs, bias = read.flatten(0, -2).to(exact), module.bias
            assert bias is None or isinstance(bias, Tensor), "layers are linear"
            expected = inputs @ weight.mT + (0 if bias is None else bias.to(exact))
            error = (rows - expected).norm(dim=0)
            size = ((inputs**2).sum(dim=0) @ (weight**2).mT).sqrt() + expected.norm(dim=0)
        faulty = int((~(error <= _tolerance(output.dtype) * size)).sum())
        if faulty:
            raise FaultyResultError(
                f"{faulty} of {len(error)} outputs of {name!r} differ from those of the compressed weight by more than "
                f"rounding, {float(error.norm() / expected.norm()):.0%} in all"
            )

    def _weight(self, layer: LayerReport) -> Tensor:
        return read_layer_weight(self.work, layer, self.dtype)


def _tolerance(dtype: torch.dtype) -> float:
    return max(_LAST_PLACES * torch.finfo(dtype).eps, _FLOAT32_TOLERANCE)


class _DeployedLoader(WeightLoader):
    """A loader that brings the stored layers within modules that it loads into the form in which they are deployed."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__(model, checkpoint, device)
        self._unloaded: dict[nn.Module, nn.Module] = {}

    def load(self, modules: Iterable[str], *, without: Iterable[str] = ()) -> None:
        """See `WeightLoader`."""
        names = tuple(modules)
        blocks = [module for name in names if _preparable(module := self._model.get_submodule(name))]
        self._unloaded |= {block: copy.deepcopy(block) for block in blocks}
        super().load(names, without=without)
        for block in blocks:
            for _name, part in _preparable(block):
                # Blocks within a model around them are loaded, and then prepared, one at a time.
                if not any(tensor.is_meta for tensor in part.state_dict().values()):
                    part.prepare_()

    def unload(self, module: nn.Module) -> None:
        """See `WeightLoader`."""
        super().unload(module)
        # The form takes memory next to parameters, and cannot be loaded again.
        for name, part in _preparable(self._unloaded.pop(module, nn.Module())):
            module.set_submodule(name, part)


def _preparable(module: nn.Module) -> list[tuple[str, StoredLinear]]:
    """Return the stored layers within a module; heads that refer to an embedding elsewhere run without another form."""
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, StoredLinear) and name]
    return [(name, part) for name, part in parts if not isinstance(part, TiedLinear)]


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
    loader = _DeployedLoader(architecture.model, checkpoint, run.device)
    return replace(run, architecture=architecture, checkpoint=checkpoint, loader=loader)


def _run_sample(artifact: Run, expected: _Expected, inputs: CalibrationInputs, monitor: Monitor) -> None:
    architecture = artifact.architecture
    walk = BlockWalk(artifact, inputs[:1], monitor.pulse)
    model = architecture.model
    tables = {name: model.get_submodule(name) for table in artifact.tables for name in table.embeddings}
    with expected.watching(tables):
        for index in range(len(architecture.layers)):
            walk.pass_through(index, partial(expected.watching_block, f"{architecture.block_name(index)}."))
        _try_head(artifact, walk, expected)


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
        logits = head(rows.flatten(0, -2)[:_FEW_TOKENS])
    for owner in owners:
        artifact.loader.unload(model.get_submodule(owner))
    if not bool(logits.isfinite().all()):
        raise FaultyResultError("it predicts numbers that are not finite")
