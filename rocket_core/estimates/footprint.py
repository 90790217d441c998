"""Memory and disk needed by a compression, from the shapes of a model alone. Loads no torch.

A run takes the shapes from the model that it has built (`rocket_core.pipeline.requirements`), a service from the
safetensors headers (`describe_model`). Both use this module, so that an estimate and a preflight agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rocket_core.config import CompressionConfig
from rocket_core.estimates.batch_size import TOKENS_PER_BATCH
from rocket_core.estimates.layer_footprint import (
    block_gram_bytes,
    held_out_tokens,
    solver_bytes,
    table_disk_bytes,
    table_memory_bytes,
    target_bytes,
)
from rocket_core.estimates.tower_footprint import TowerShape, tower_of_headers
from rocket_core.inspection.headers.block_lists import compressed_lists, list_of
from rocket_core.inspection.headers.header_layers import find_layers, likely_tables
from rocket_core.inspection.headers.model_fields import HEADS, HIDDEN_SIZES, active_part, find_number, predicts_tokens
from rocket_core.inspection.headers.weight_summary import ITEM_BYTES, WeightSummary, item_bytes, storage_dtype
from rocket_core.sizes import budget
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.target import ByRatio

_FLOAT64 = 8
_FLOAT32 = 4
# Numbers of a block that refinement holds for each of its weights: the copy that is trained, its gradient and two
# moments, scales of codes, three states between which it chooses, and one while the optimizer computes.
_REFINED_COPIES = 9
# Most logits of a piece of text, and numbers that a gradient holds for each: of both models, in float32 and in the
# model's dtype, their logarithms and gradients.
_LOGITS_PER_PIECE, _LOGIT_COPIES = 16 * 2**20, 8
# Bytes of a logit, its gradient and what an entropy is computed from.
_LOGIT_BYTES = 26
# Numbers per token and hidden unit that a backward pass of a block reads.
_KEPT_FOR_GRADIENTS = 30
# Numbers that rounding every weight by itself holds for each weight of a layer.
_ROUNDED_COPIES = 8
# Libraries in a process that runs a model: 0.3 GiB were measured on a CPU.
_RUNTIME = 512 * 2**20
# One batch of logits in the model's dtype and upcast, and the float64 copies of a chunk.
_LOGITS_IN_MEMORY = 768 * 2**20
HEADROOM = 448 * 2**20
"""Python, torch, transformers and allocator overhead in addition to the tensors that are counted."""
# On a CPU that computes in float32 for all of them; see `system.devices.compute_dtype`.
_COMPUTE_BYTES = {"F16": 4, "float16": 4, "BF16": 4, "bfloat16": 4}
# Hidden states of models in these are rounded between blocks, see `Run.held_dtype`.
_HELD = frozenset({"BF16", "bfloat16"})
# These need the Gram matrix of every layer's input.
_INPUT_METHODS = frozenset({"magnitude", "wanda", "sparsegpt", "rtn", "gptq"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        layers: `(d_in, d_out)` of the selected layers, for each block that has any.
        block_parameters: parameters of each block, without those of a tower: a decoder is loaded with its whole tower.
        parameters: parameters of the whole model.
        hidden_size: numbers per token between two blocks.
        itemsize: bytes of a number in the artifacts.
        compute_itemsize: bytes of a number in memory.
        held_itemsize: bytes of a number of hidden states between blocks; None for `compute_itemsize`.
        largest_table: parameters of the largest tensor outside the blocks; None if it is unknown.
        stored_bytes: bytes of the checkpoint, with weights in few bits decoded.
        predicts: whether sensitivities are those of the loss of predicted tokens.
        tower: the tower whose layers are selected; None for none.
        tables: `(d_in, d_out)` of token embedding and head, where they may be quantized.
        active_part: part of a block's weights that a token passes: less than 1 in a mixture of experts.
        heads: attention heads of a block; 0 if they are unknown.
    """

    layers: tuple[tuple[Shape, ...], ...]
    block_parameters: tuple[int, ...]
    parameters: int
    hidden_size: int
    itemsize: int
    compute_itemsize: int
    stored_bytes: int
    held_itemsize: int | None = None
    largest_table: int | None = None
    predicts: bool = False
    tower: TowerShape | None = None
    tables: tuple[Shape, ...] = ()
    active_part: float = 1.0
    heads: int = 0

    @property
    def shapes(self) -> list[Shape]:
        """`(d_in, d_out)` of all selected layers."""
        return [shape for block in self.layers for shape in block]

    def passed_parameters(self, vocabulary: int) -> float:
        """Return the parameters that a token is multiplied with: those of all blocks, and a head of so many logits."""
        return sum(self.block_parameters) * self.active_part + vocabulary * self.hidden_size

    @property
    def other_bytes(self) -> int:
        """Bytes in an artifact of all parameters other than the selected layers."""
        return (self.parameters - self.compressible_parameters) * self.itemsize

    @property
    def compressible_parameters(self) -> int:
        """Parameters of the selected layers."""
        return sum(d_in * d_out for block in self.layers for d_in, d_out in block)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work to be done with a model.

    Attributes:
        config: all settings.
        windows: calibration samples: windows of text or audio, or images.
        sequence_length: positions per sample, summed over all lists of blocks; for text, its tokens.
        input_bytes: bytes of one sample as the model reads it.
        patches: patches of the images of one sample, where a tower is compressed.
        batch_tokens: most positions that are computed at once.
    """

    config: CompressionConfig
    windows: int
    sequence_length: int
    input_bytes: int = 0
    patches: int = 0
    batch_tokens: int = TOKENS_PER_BATCH

    @property
    def tokens(self) -> int:
        """Positions of all samples."""
        return self.windows * self.sequence_length

    @property
    def itemsize(self) -> int:
        """Bytes of a number in supports and least squares."""
        return ITEM_BYTES[self.config.precision]

    @property
    def input_grams(self) -> bool:
        """Whether the Gram matrix of every layer's input is collected, even if that of its output is smaller."""
        config = self.config
        if not config.calibrates:
            return False
        computed = config.method == "rocket" and ("sparse" in config.kinds or config.quantizes)
        return computed or config.rounds_values or config.method in _INPUT_METHODS


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceEstimate:
    """Resources needed at the most demanding moment of a run.

    Attributes:
        memory_bytes: memory of the computing device.
        disk_bytes: disk for the work folder and the artifacts.
    """

    memory_bytes: int
    disk_bytes: int

    def before(self, other: "ResourceEstimate") -> "ResourceEstimate":
        """Return the resources needed if something else follows, while what this has written stays on disk."""
        return ResourceEstimate(
            memory_bytes=max(self.memory_bytes, other.memory_bytes), disk_bytes=self.disk_bytes + other.disk_bytes
        )


def estimate_footprint(model: ModelShape, work: Workload) -> ResourceEstimate:
    """Estimate the memory and disk of a compression.

    Memory is the sum of the calibration inputs, the hidden states of all samples, and the largest of: the embeddings
    with either the largest of them as stored, while it is read, or logits and what is computed of them; one block's
    weights, Gram matrices and the activations of one batch; these Gram matrices and the memory needed to solve the
    largest layer. Sequential compression holds the hidden states of two models and as many outputs of parts of their
    blocks, two copies of a block, and two Gram matrices at a time; refinement then several more copies of a block, and
    what a backward pass of it reads. A tower is walked first, with its own states. Where embedding and head may be
    quantized, everything outside the blocks counts as theirs. Disk is the sum of the cached statistics (or of the
    hidden states that sensitivities are measured on, which precede them, if larger), of the factors, and of the
    artifacts.

    Args:
        model: the model's sizes; at least one selected layer.
        work: the work to be done.
    """
    prelude = model.parameters - sum(model.block_parameters)
    if not work.config.calibrates:
        return _uncalibrated_footprint(model, work, prelude)
    if work.config.sequential:
        # Both models run in float32, and their hidden states are not rounded.
        model = replace(model, compute_itemsize=max(model.compute_itemsize, _FLOAT32), held_itemsize=None)
    states = work.tokens * model.hidden_size
    hidden = states * (model.held_itemsize or model.compute_itemsize)
    block = max(model.block_parameters) * model.compute_itemsize
    how = {"input_grams": work.input_grams}
    grams = max(block_gram_bytes(block, **how) for block in model.layers)
    rounds = work.config.quantizes
    solver = max(solver_bytes(shape, itemsize=work.itemsize, rounds=rounds, **how) for shape in model.shapes)
    batch = min(work.tokens, max(work.batch_tokens, work.sequence_length))
    activations = batch * max(max(shape) for shape in model.shapes) * (3 * model.compute_itemsize + 2 * work.itemsize)
    if work.config.weighs_tokens and model.predicts:
        # What attention, its output, gate and down read.
        widest = max(d_in for d_in, _ in model.shapes)
        grams += held_out_tokens(work.tokens) * (3 * model.hidden_size + widest) * work.itemsize
    working = grams + max(solver, block + activations) + hidden
    if work.config.sequential:
        sums = 5 * max(d_in for d_in, _ in model.shapes) ** 2 * _FLOAT64
        layer = max(solver, *(target_bytes(shape) for shape in model.shapes))
        working = max(working, 2 * block + sums + max(layer, 2 * activations) + 6 * states * model.compute_itemsize)
    if work.config.refine:
        # The next block is read as well, and in the end what predicts tokens.
        tuned = _tuned_numbers(model, batch, prelude) * _FLOAT32 + prelude * model.compute_itemsize
        working = max(working, 3 * block + tuned + 7 * states * model.compute_itemsize)
    table = model.largest_table or prelude
    read = table * model.stored_bytes // model.parameters
    if model.predicts and work.config.measures_sensitivities:
        logits = min(_LOGITS_PER_PIECE, batch * (table // model.hidden_size))
        read = max(read, logits * _LOGIT_BYTES)
    if model.tower is not None:
        # Its blocks are read one after the other.
        read = max(read, model.tower.block_parameters * model.compute_itemsize)
        held = model.tower.held_numbers(patches=work.patches, samples=work.windows) * model.compute_itemsize
        activations = work.patches * model.tower.widest * (3 * model.compute_itemsize + 2 * work.itemsize)
        working = max(working, (3 if work.config.sequential else 1) * held + grams + max(solver, activations))
    inputs = work.windows * work.input_bytes
    memory = max(prelude * model.compute_itemsize + read + hidden, working) + inputs + HEADROOM
    # Only a ratio says what is certain to be removed without the model's sizes.
    ratio = work.config.target.ratio if isinstance(work.config.target, ByRatio) else 0.0
    disk = _statistics_disk(model, work) + inputs + _factors_bytes(model, ratio)
    if work.config.profiles_tables:
        sizes = {"compute_itemsize": model.compute_itemsize, "itemsize": work.itemsize}
        tables = table_memory_bytes(prelude, model.hidden_size, **sizes)
        memory = max(memory, tables + hidden + inputs + HEADROOM)
        disk += table_disk_bytes(prelude, model.hidden_size)
    return ResourceEstimate(memory_bytes=memory, disk_bytes=disk + len(work.config.export) * model.stored_bytes)


def _tuned_numbers(model: ModelShape, batch: int, prelude: int) -> int:
    """Return the numbers that gradient steps on a block hold in float32."""
    tuned = (_REFINED_COPIES + 1) * max(model.block_parameters)
    tuned += 2 * _KEPT_FOR_GRADIENTS * batch * model.hidden_size
    return tuned + _LOGIT_COPIES * min(_LOGITS_PER_PIECE, batch * (prelude // model.hidden_size))


def _uncalibrated_footprint(model: ModelShape, work: Workload, prelude: int) -> ResourceEstimate:
    """Estimate the memory and disk of a run that reads one weight at a time, and runs no model."""
    needed = max(d_in * d_out for d_in, d_out in model.shapes) * _ROUNDED_COPIES * work.itemsize
    disk = _factors_bytes(model, 0.0) + len(work.config.export) * model.stored_bytes
    if work.config.profiles_tables:
        sizes = {"compute_itemsize": model.compute_itemsize, "itemsize": work.itemsize}
        needed = max(needed, table_memory_bytes(prelude, model.hidden_size, **sizes))
        disk += table_disk_bytes(prelude, model.hidden_size)
    return ResourceEstimate(memory_bytes=needed + HEADROOM, disk_bytes=disk)


def benchmark_footprint(model: ModelShape, exports: int) -> ResourceEstimate:
    """Estimate the memory for running the original and its artifacts at the same time, each in its own process.

    Layers that are packed in memory take less than the dense ones that are counted.

    Args:
        model: the model's sizes.
        exports: number of artifacts.
    """
    each = model.stored_bytes * 3 // 2 + _RUNTIME
    return ResourceEstimate(memory_bytes=(1 + exports) * each, disk_bytes=0)


def evaluation_footprint(model: ModelShape, *, tokens: int, vocabulary: int) -> ResourceEstimate:
    """Estimate the memory and disk for comparing the dense and the compressed model, one after the other.

    Memory is that of one whole model, half as much again for the factors of a compressed one (which are unpacked while
    it runs), and the logits being computed. Disk is that of the dense model's logits.

    Args:
        model: the model's sizes.
        tokens: number of tokens predicted.
        vocabulary: logits per token.
    """
    memory = model.parameters * model.compute_itemsize * 3 // 2 + _LOGITS_IN_MEMORY + HEADROOM
    return ResourceEstimate(memory_bytes=memory, disk_bytes=tokens * vocabulary * model.compute_itemsize)


def sensitivity_disk_bytes(model: ModelShape, *, windows: int, sequence_length: int) -> int:
    """Return the disk used while sensitivities are measured: hidden states at both ends of every block.

    For a moment the gradient at the output of the last block is stored as well. The final vectors are small.

    Args:
        model: the model's sizes.
        windows: number of windows used.
        sequence_length: tokens per window.
    """
    boundaries = len(model.block_parameters) + 2
    return boundaries * windows * sequence_length * model.hidden_size * model.compute_itemsize


def rocket_export_bytes(model: ModelShape, ratio: float) -> int:
    """Return an upper bound on the bytes of a model's `rocket` artifact.

    Args:
        model: the model's sizes.
        ratio: compression ratio, [0, 1).
    """
    dense = model.compressible_parameters * model.itemsize
    return model.stored_bytes - dense + _factors_bytes(model, ratio)


def describe_model(
    config: Mapping[str, object],
    weights: WeightSummary,
    *,
    ignore: Sequence[str] = (),
    dtype: str = "auto",
    vision: bool = False,
) -> ModelShape:
    """Return the sizes of a model according to config.json and the safetensors headers.

    The largest list of numbered blocks is used, in an encoder-decoder together with its counterpart; of a model that
    reads text and images, the largest that is not of its tower. Every weight
    matrix in it counts as a compressible layer, and so does every matrix of an expert in a tensor of all of them. The
    actual modules are known only once the model is built: routers, for instance, are counted here and left alone by a
    run.

    Args:
        config: the content of config.json.
        weights: summary of the safetensors headers.
        ignore: glob patterns of layers to leave alone.
        dtype: dtype of the artifacts; `auto` is the checkpoint's own. Memory is that of a CPU that runs
            float16 and bfloat16 models in float32.
        vision: whether the layers in the blocks of a tower of images are selected as well. Their blocks still count as
            what precedes those of the decoder, which is loaded as a whole.

    Raises:
        AlreadyQuantizedError: most weights are not plain floating-point numbers.
        UnsupportedArchitectureError: no layer is left to compress.
        InvalidConfigError: matching the patterns with the names would take too much work.
    """
    stored = storage_dtype(weights, "the model")
    dtype = stored if dtype == "auto" else dtype
    lists = compressed_lists(config, weights)
    hidden_size = find_number(config, HIDDEN_SIZES)
    layers = {
        block: [shape for _, shape in found]
        for block, found in find_layers(config, weights, ignore=ignore, vision=vision).items()
    }
    return ModelShape(
        layers=tuple(tuple(shapes) for shapes in layers.values()),
        block_parameters=tuple(count for block, count in weights.block_parameters.items() if list_of(block) in lists),
        parameters=weights.parameters,
        tower=tower_of_headers(layers, weights, compressed_lists(config, weights, vision=vision) - lists),
        hidden_size=hidden_size or max(min(shape) for block in layers.values() for shape in block),
        itemsize=item_bytes(weights, dtype, "the model"),
        compute_itemsize=_COMPUTE_BYTES.get(dtype, ITEM_BYTES[dtype]),
        held_itemsize=ITEM_BYTES[dtype] if dtype in _HELD else None,
        predicts=predicts_tokens(config) or bool(config.get("is_encoder_decoder")),
        largest_table=min(weights.largest_tensor, weights.parameters - sum(weights.block_parameters.values())) or None,
        stored_bytes=weights.decoded_bytes,
        tables=likely_tables(config, weights, ignore=ignore),
        active_part=active_part(config),
        heads=find_number(config, HEADS) or 0,
    )


def _statistics_disk(model: ModelShape, work: Workload) -> int:
    config = work.config
    kept = 0
    if not config.sequential:  # sequential compression computes its own statistics, layer by layer
        shapes = [shape for block in model.layers for shape in block]
        kept = sum(min(shape) * (shape[1] * work.itemsize + _FLOAT64) for shape in shapes)
        kept += sum(d_in**2 * work.itemsize for d_in, _ in shapes) if work.input_grams else 0
    states = 0
    if config.measures_sensitivities:
        windows = config.gradient_windows(work.windows)
        states = sensitivity_disk_bytes(model, windows=windows, sequence_length=work.sequence_length)
    return max(min(kept, config.statistics_quota_bytes), states)


def _factors_bytes(model: ModelShape, ratio: float) -> int:
    # No candidate keeps more than its dense layer, but its mask may add an eighth of a byte per coefficient.
    total = model.compressible_parameters
    return budget.parameter_budget(total, ratio) * model.itemsize + math.ceil(total / 8)
