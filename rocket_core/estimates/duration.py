"""Time needed by a compression, from the shapes of a model and the speed of a machine. Loads no torch."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from rocket_core.config import CompressionConfig, Stage
from rocket_core.estimates.code_duration import (
    compressing_codes,
    profiling_codes,
    profiling_table,
    why_codes_are_uncounted,
)
from rocket_core.estimates.evaluation_duration import EvaluationSizes, evaluation_operations
from rocket_core.estimates.footprint import ModelShape, Workload
from rocket_core.estimates.healing_duration import HealingWork, healing_operations
from rocket_core.estimates.operations import FLOAT32_BYTES, Operations, activation_passes, model_products
from rocket_core.estimates.sequential_duration import (
    following_inputs,
    refining,
    searching_dictionaries,
    step_tokens,
)
from rocket_core.sizes.budget import Shape
from rocket_core.system.machine_speed import MachineSpeed

# Numbers of products and of passes over memory, as counted on a block with the shapes of Llama-3.2-1B; speeds of other
# operations as parts of that of products.
_CHOLESKY_SPEED, _EIGH_SPEED = 0.45, 0.65
_ROUGH_FROM = 512
_PATH_PRODUCTS, _PATH_STOPS, _PATH_PASSES = 91, 7, 10
_CUT_PASSES, _SHAPES, _SHAPE_PASSES = 8, 4, 30
_PRODUCTS, _PASSES = 23, 300
_SAMPLED, _SAMPLED_PART, _MOST_SAMPLED = 128, 8, 2**20
# Passes forward and backward that measure sensitivities.
_DIFFERENTIATING_PASSES = 6
# Passes over what the layers of a block read and return: forward, and forward and backward with sensitivities.
_FORWARD_PASSES, _SENSITIVITY_PASSES = 8, 28
# Seconds for a layer of any size, in each stage: thousands of small operations. The first pass backward starts slowly.
_PROFILE_SECONDS, _COMPRESS_SECONDS, _BACKWARD_SECONDS = 0.025, 0.01, 1.0
# The same to measure and to write a layer's codes.
_CODES_SECONDS = 0.028
# Seconds to start, and to write a checkpoint's bytes.
_START_SECONDS, _WRITTEN_BYTES = 1.2, 5e8
# Numbers of weights that a trial run of an artifact unpacks, multiplies and compares in a second.
_TRIED_NUMBERS = 2e7


# One core of a processor that multiplies bfloat16 matrices; progress depends on the proportions only.
NOMINAL_SPEED = MachineSpeed(products=190e9, rough_products=750e9, memory=4.5e9)


def why_uncounted(config: CompressionConfig) -> str | None:
    """Return why the operations of a compression are not known; None if they are."""
    if config.method != "rocket":
        return f"the operations of the method {config.method} are not counted"
    if config.quantizes:
        return why_codes_are_uncounted(config)
    if config.rounds_values:
        return "the operations that round what is kept (value_bits) are not counted"
    return None if "sparse" in config.kinds else "operations are counted where the kind sparse is allowed only"


def count_operations(
    model: ModelShape,
    work: Workload,
    *,
    healing: HealingWork | None = None,
    evaluation: EvaluationSizes | None = None,
) -> Mapping[Stage, Operations] | None:
    """Count the operations of each stage of a compression, without download and benchmark.

    Args:
        model: the model's sizes.
        work: the work to be done.
        healing: the healing that follows; None for none.
        evaluation: the evaluation that follows; None for none.

    Returns:
        Operations by stage; None for settings that `why_uncounted` names.
    """
    config = work.config
    if why_uncounted(config) is not None:
        return None
    found: dict[Stage, Operations] = {"preflight": Operations(seconds=_START_SECONDS)}
    if config.measures_sensitivities:
        tokens = min(work.windows, config.sensitivity_samples) * work.sequence_length
        reached = tokens * model.active_part
        passes = model_products(2 * _DIFFERENTIATING_PASSES * model.parameters * reached, model.itemsize)
        passes += activation_passes(_SENSITIVITY_PASSES, model.shapes, reached)
        found["differentiating"] = passes + Operations(seconds=_BACKWARD_SECONDS)
    found["calibrating"] = sum(
        (
            _passing(model, index, work.tokens) + _profiling_block(block, config)
            for index, block in enumerate(model.layers)
        ),
        Operations(),
    )
    if config.profiles_tables:
        found["calibrating"] += sum((profiling_table(shape, config) for shape in model.tables), Operations())
    if config.target is not None:
        found["factorizing"] = sum((_compressing(shape, config) for shape in model.shapes), Operations())
        if config.sequential:
            following = (_following(model, index, work) for index in range(len(model.layers)))
            found["factorizing"] += sum(following, Operations())
        if config.decides_tables:
            tables = (compressing_codes(shape, config, is_table=True) for shape in model.tables)
            found["factorizing"] += sum(tables, Operations())
        if healing is not None:
            found["healing"] = healing_operations(model, healing)
        tried = model.compressible_parameters / _TRIED_NUMBERS
        found["exporting"] = Operations(seconds=len(config.export) * (model.stored_bytes / _WRITTEN_BYTES + tried))
    if evaluation is not None:
        found["evaluating"] = evaluation_operations(model, evaluation)
    return found


def _passing(model: ModelShape, index: int, tokens: int, *, sums: bool = True) -> Operations:
    """Return the operations to pass calibration tokens through a block, and to sum up Gram matrices."""
    block, parameters = model.layers[index], model.block_parameters[min(index, len(model.block_parameters) - 1)]
    reached = tokens * model.active_part
    grams = Operations(products=2 * _gram_numbers(block) * reached) if sums else Operations()
    return (
        model_products(2 * parameters * reached, model.itemsize)
        + grams
        + activation_passes(_FORWARD_PASSES, block, reached)
    )


def _following(model: ModelShape, index: int, work: Workload) -> Operations:
    block = model.layers[index]
    found = following_inputs(
        block,
        _passing(model, index, work.tokens, sums=False),
        gram_numbers=_gram_numbers(block),
        tokens=work.tokens * model.active_part,
        whole_texts=not model.predicts,
    )
    if not work.config.refine:
        return found
    parameters = model.block_parameters[min(index, len(model.block_parameters) - 1)]
    activations = activation_passes(_SENSITIVITY_PASSES, block, step_tokens(work.tokens) * model.active_part)
    return found + refining(
        parameters, activations, layers=len(block), tokens=work.tokens, active_part=model.active_part
    )


def _profiling_block(block: Sequence[Shape], config: CompressionConfig) -> Operations:
    readers = Counter(d_in for d_in, _ in block)
    found = sum((_profiling(shape, config, shares=readers[shape[0]] > 1) for shape in block), Operations())
    searches = config.sequential and not config.quantizes and "shared" in config.kinds
    return found + searching_dictionaries(block) if searches else found


def _profiling(shape: Shape, config: CompressionConfig, *, shares: bool) -> Operations:
    if not config.quantizes:
        return _pruning_and_looking(shape, shares=shares)
    found = profiling_codes(shape, config)
    return found + _looking(shape) if shares and "shared" in config.kinds else found


def _compressing(shape: Shape, config: CompressionConfig) -> Operations:
    if not config.quantizes:
        return _pruning(*shape)
    return compressing_codes(shape, config) + Operations(seconds=_CODES_SECONDS)


def total_operations(
    model: ModelShape,
    work: Workload,
    *,
    healing: HealingWork | None = None,
    evaluation: EvaluationSizes | None = None,
) -> Operations | None:
    """Count the operations of all these stages together; the arguments are as above."""
    by_stage = count_operations(model, work, healing=healing, evaluation=evaluation)
    return None if by_stage is None else sum(by_stage.values(), Operations())


def layer_parts(shapes: Sequence[Shape], *, compressing: bool) -> list[float]:
    """Return which part of the time of all layers the first 0, 1, ... of them take, to profile or to compress them."""
    each = [_pruning(*shape) if compressing else _pruning_and_looking(shape, shares=True) for shape in shapes]
    ends = list(itertools.accumulate((part.duration(NOMINAL_SPEED) for part in each), initial=0.0))
    return [end / ends[-1] for end in ends] if shapes else [1.0]


def _gram_numbers(block: Sequence[Shape]) -> int:
    """Return the numbers of all Gram matrices of a block: about two layers read the same input."""
    return sum(d_in**2 * ((count + 1) // 2) for d_in, count in Counter(d_in for d_in, _ in block).items())


def _in_splitting(d_in: int, operations: float) -> Operations:
    return Operations(rough_products=operations) if d_in >= _ROUGH_FROM else Operations(products=operations)


def _pruning_and_looking(shape: Shape, *, shares: bool) -> Operations:
    """Return the operations to profile a layer: pruned weights on a sample of the outputs, a look at dictionaries."""
    d_in, d_out = shape
    numbers = d_in * d_out
    sampled = min(d_out, max(_SAMPLED, min(_MOST_SAMPLED // d_in, d_out // _SAMPLED_PART)))
    # Three factors, two of them inverted.
    products = 7 / 3 * d_in**3 / _CHOLESKY_SPEED + 2 * d_in**2 * (_PATH_STOPS * sampled + d_out)
    passes = _PATH_PRODUCTS * _PATH_PASSES * d_in * sampled + _PATH_STOPS * _CUT_PASSES * numbers
    path = _in_splitting(d_in, 2 * _PATH_PRODUCTS * d_in**2 * sampled)
    own = path + Operations(products=products, memory=passes * FLOAT32_BYTES, seconds=_PROFILE_SECONDS)
    # For members of a group, once more for the dictionary that they would share.
    return own + _looking(shape) + _looking(shape) if shares else own + _looking(shape)


def _looking(shape: Shape) -> Operations:
    """Return the operations to see whether dictionaries come near other kinds."""
    numbers, side = shape[0] * shape[1], min(shape)
    products = 9 * side**3 / _EIGH_SPEED + 2 * side * numbers + 1.5 * _SHAPES * side * numbers
    return Operations(products=products, memory=_SHAPES * _SHAPE_PASSES * side * shape[1] * FLOAT32_BYTES)


def _pruning(d_in: int, d_out: int) -> Operations:
    """Return the operations to prune a layer."""
    products = 4 / 3 * d_in**3 / _CHOLESKY_SPEED + 2 * 2 * d_in**2 * d_out
    memory = _PASSES * d_in * d_out * FLOAT32_BYTES
    splitting = _in_splitting(d_in, 2 * _PRODUCTS * d_in**2 * d_out)
    return splitting + Operations(products=products, memory=memory, seconds=_COMPRESS_SECONDS)
