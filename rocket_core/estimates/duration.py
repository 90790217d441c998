"""Time needed by a compression, from the shapes of a model and the speed of a machine. Loads no torch."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from rocket_core.config import CompressionConfig, Stage
from rocket_core.estimates.code_duration import codes_work, profile_work, why_codes_are_uncounted
from rocket_core.estimates.evaluation_duration import EvaluationSizes, evaluation_operations
from rocket_core.estimates.footprint import ModelShape, Workload
from rocket_core.estimates.healing import HealingWork, healing_operations
from rocket_core.estimates.operations import FLOAT32_BYTES, Operations, activation_passes, model_products
from rocket_core.sizes.block_types import block_types_for
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.target import ByLoss
from rocket_core.system.machine_speed import MachineSpeed

# Numbers of products and of passes over memory, as counted on a block with the shapes of Llama-3.2-1B; speeds of other
# operations as parts of that of products.
_CHOLESKY_SPEED, _EIGH_SPEED = 0.3, 0.65
_ROUGH_FROM = 512
_PATH_PRODUCTS, _PATH_STOPS, _PATH_PASSES = 55, 5, 27
_CUT_PASSES, _SHAPES, _SHAPE_PASSES = 8, 4, 30
_PRODUCTS, _PASSES = 23, 450
_SAMPLED, _SAMPLED_PART, _MOST_SAMPLED = 128, 8, 2**20
# Passes forward and backward that measure sensitivities.
_DIFFERENTIATING_PASSES = 6
# Passes over what the layers of a block read and return, and over the scores of attention: forward, and forward and
# backward with sensitivities.
_FORWARD_PASSES, _SENSITIVITY_PASSES = 8, 16
_FORWARD_SCORES, _SENSITIVITY_SCORES = 4, 18
# Part of a Gram matrix that is computed, as it is symmetric.
_SYMMETRIC = 0.6
# Seconds for a layer of any size: to prune it, in each stage, which is hundreds of small operations; to differentiate
# it; to predict its losses on held-out tokens and to write its profile; and to write it.
_PROFILE_SECONDS, _COMPRESS_SECONDS = 0.009, 0.002
_GRADIENT_SECONDS, _LOSS_SECONDS, _WRITE_SECONDS = 0.008, 0.03, 0.012
# Seconds to start, to write a checkpoint and for each export; bytes of a checkpoint that are written in a second.
_START_SECONDS, _EXPORT_SECONDS, _WRITTEN_BYTES = 0.5, 0.25, 5e8
# Numbers of weights that a trial run of an artifact unpacks, multiplies and compares in a second.
_TRIED_NUMBERS = 2e7

# Sequential compression. Numbers of passes were fitted to the processor time of Llamas with 192, 512 and 2,048 hidden
# units, at 2,048 to 65,536 tokens, on one thread of an AMD EPYC (Zen 5); `python -m benchmarks.duration` compares
# estimates with measured times.
#
# Passes of calibration data through a block, of both models together: up to each input that layers read, with what
# attention returned kept.
_FOLLOWING_PASSES = 3.6
# Matrices of sums for each input; of texts that are read in both directions.
_SUMS, _WHOLE_TEXT_SUMS = 2, 5
# Products in float64 for a target and its error, and operations in float32 that take as long as one in float64: of a
# product, and of a solution by LAPACK.
_TARGET_PRODUCTS, _DOUBLE, _SOLVED_DOUBLE = 3, 2.0, 2.5
# Shared dictionaries whose errors may win, as sweeps improve them: products, and passes over the weight, to search for
# them at all ratios. That is so for layers that together have at least so many outputs for each input.
_SEARCH_PRODUCTS, _SEARCH_PASSES, _LEAST_OUTPUTS = 80, 4700, 2
# Refinement: gradient steps, passes over the weights for each, and the most tokens that it takes; its seconds on any
# machine, for a block and for each of its layers, and passes over what these read and return; tests, each a pass
# through two blocks, and the part of the tokens that is held out for them.
_STEPS, _STEP_PASSES, _MOST_STEP_TOKENS = 100, 20, 1024
_STEP_SECONDS, _LAYER_SECONDS, _STEP_ACTIVATIONS = 0.012, 0.0018, 28
_TESTS, _HELD_OUT = 6, 8
# Products of a weight in a step: forward and backward, with gradients of the weight, and without in the next block.
_STEP_PRODUCTS = 5

# Rounding every weight by itself: seconds for each layer in each stage, and for each block type that is tried; passes
# over the weight to read it, and to round it to codes and to blocks.
_PLAIN_SECONDS, _BLOCK_TYPE_SECONDS = 0.01, 0.01
_READ_PASSES, _CODE_PASSES, _BLOCK_PASSES = 8, 45, 300

# One core of a processor that multiplies bfloat16 matrices; progress depends on the proportions only.
NOMINAL_SPEED = MachineSpeed(products=190e9, rough_products=750e9, memory=4.5e9)


def why_uncounted(config: CompressionConfig) -> str | None:
    """Return why the operations of a compression are not known; None if they are."""
    if config.method != "rocket":
        return f"the operations of the method {config.method} are not counted"
    if isinstance(config.target, ByLoss):
        return f"how many sizes are tried until {config.target.measure} holds is not known"
    if not config.calibrates:
        return None
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
    if not config.calibrates:
        found |= _rounding(model, config)
        return found if evaluation is None else found | {"evaluating": evaluation_operations(model, evaluation)}
    if config.measures_sensitivities:
        tokens = config.gradient_windows(work.windows) * work.sequence_length
        reached = tokens * model.active_part
        passes = model_products(2 * _DIFFERENTIATING_PASSES * model.parameters * reached, model.itemsize)
        passes += activation_passes(_SENSITIVITY_PASSES, model.shapes, reached, _activation_bytes(model, config))
        scores = _scores(model, tokens, work.sequence_length).times(_SENSITIVITY_SCORES * len(model.block_parameters))
        found["differentiating"] = passes + scores + Operations(seconds=_GRADIENT_SECONDS * len(model.shapes))
    found["calibrating"] = sum(
        (_passing(model, index, work) + _profiling_block(block, config) for index, block in enumerate(model.layers)),
        Operations(),
    )
    if config.profiles_tables:
        tables = (profile_work(shape, config, is_table=True).of(shape) for shape in model.tables)
        found["calibrating"] += sum(tables, Operations())
    if config.target is not None:
        found["factorizing"] = sum((_compressing(shape, config) for shape in model.shapes), Operations())
        if config.sequential:
            following = (_following(model, index, work) for index in range(len(model.layers)))
            found["factorizing"] += sum(following, Operations())
        if config.decides_tables:
            tables = (codes_work(shape, config, is_table=True).of(shape) for shape in model.tables)
            found["factorizing"] += sum(tables, Operations())
        if healing is not None:
            found["healing"] = healing_operations(model, healing)
        tried = model.compressible_parameters / _TRIED_NUMBERS
        written = model.stored_bytes / _WRITTEN_BYTES + _EXPORT_SECONDS + tried
        found["exporting"] = Operations(seconds=len(config.export) * written)
    if evaluation is not None:
        found["evaluating"] = evaluation_operations(model, evaluation)
    return found


def _rounding(model: ModelShape, config: CompressionConfig) -> Mapping[Stage, Operations]:
    """Return the operations of each stage where every weight is rounded by itself."""
    tables = model.tables if config.profiles_tables else ()
    blocks, shapes = config.code_choices.blocks, [*model.shapes, *tables]
    numbers, seconds = sum(d_in * d_out for d_in, d_out in shapes), _PLAIN_SECONDS * len(shapes)
    searching = _BLOCK_TYPE_SECONDS * sum(len(block_types_for(d_in, blocks)) for d_in, _ in shapes) if blocks else 0.0
    read = Operations(seconds=seconds, memory=_READ_PASSES * numbers * FLOAT32_BYTES)
    found: dict[Stage, Operations] = {"calibrating": read + Operations(seconds=searching)}
    if config.target is not None:
        passes = _BLOCK_PASSES if blocks else _CODE_PASSES
        found["factorizing"] = Operations(seconds=seconds, memory=passes * numbers * FLOAT32_BYTES)
        found["exporting"] = Operations(seconds=len(config.export) * model.stored_bytes / _WRITTEN_BYTES)
    return found


def _scores(model: ModelShape, tokens: int, length: int) -> Operations:
    """Return the operations of a pass over the scores of a block's attention, of all tokens for all of their window."""
    return Operations(memory=model.heads * tokens * length * FLOAT32_BYTES)


def _passing(model: ModelShape, index: int, work: Workload, *, sums: bool = True) -> Operations:
    """Return the operations to pass calibration tokens through a block, and to sum up Gram matrices."""
    block, parameters = model.layers[index], model.block_parameters[min(index, len(model.block_parameters) - 1)]
    reached = work.tokens * model.active_part
    grams = Operations(products=_SYMMETRIC * 2 * _gram_numbers(block) * reached) if sums else Operations()
    return (
        model_products(2 * parameters * reached, model.itemsize)
        + grams
        + activation_passes(_FORWARD_PASSES, block, reached, _activation_bytes(model, work.config))
        + _scores(model, work.tokens, work.sequence_length).times(_FORWARD_SCORES)
    )


def _activation_bytes(model: ModelShape, config: CompressionConfig) -> int:
    """Return the bytes of a number that passes between layers: sequential compression runs models in float32."""
    return FLOAT32_BYTES if config.sequential else model.itemsize


def _following(model: ModelShape, index: int, work: Workload) -> Operations:
    """Return the operations to sum up what layers read in both models, to find their targets, and to refine a block."""
    block, tokens = model.layers[index], work.tokens * model.active_part
    sums = (_SUMS if model.predicts else _WHOLE_TEXT_SUMS) * 2 * _gram_numbers(block) * tokens
    targets = sum(_TARGET_PRODUCTS * _DOUBLE * 2 * d_in**2 * d_out for d_in, d_out in block)
    solved = sum(_SOLVED_DOUBLE * (2 / 3 * d_in**3 + 2 * d_in**2 * d_out) for d_in, d_out in block)
    forward = _passing(model, index, work, sums=False)
    found = forward.times(_FOLLOWING_PASSES) + Operations(products=sums + targets + solved)
    return found + _refining(model, index, work.tokens) if work.config.refine else found


def _refining(model: ModelShape, index: int, tokens: int) -> Operations:
    block, parameters = model.layers[index], model.block_parameters[min(index, len(model.block_parameters) - 1)]
    passed, step_tokens = parameters * model.active_part, min(_MOST_STEP_TOKENS, tokens // _HELD_OUT)
    step = Operations(
        products=_STEP_PRODUCTS * 2 * passed * step_tokens,
        memory=_STEP_PASSES * parameters * FLOAT32_BYTES,
        seconds=_STEP_SECONDS + _LAYER_SECONDS * len(block),
    )
    activations = activation_passes(_STEP_ACTIVATIONS, block, step_tokens * model.active_part)
    tests = Operations(products=_TESTS * 2 * 2 * passed * tokens / _HELD_OUT)
    return (step + activations).times(_STEPS) + tests


def _profiling_block(block: Sequence[Shape], config: CompressionConfig) -> Operations:
    readers = Counter(d_in for d_in, _ in block)
    found = sum((_profiling(shape, config, shares=readers[shape[0]] > 1) for shape in block), Operations())
    searches = config.sequential and not config.quantizes and "shared" in config.kinds
    return found + _searching_dictionaries(block) if searches else found


def _profiling(shape: Shape, config: CompressionConfig, *, shares: bool) -> Operations:
    losses = Operations(seconds=_LOSS_SECONDS)
    if not config.quantizes:
        return losses + _pruning_and_looking(shape, shares=shares)
    return losses + profile_work(shape, config).of(shape)


def _compressing(shape: Shape, config: CompressionConfig) -> Operations:
    found = codes_work(shape, config).of(shape) if config.quantizes else _pruning(*shape)
    return found + Operations(seconds=_WRITE_SECONDS)


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


def _searching_dictionaries(block: Sequence[Shape]) -> Operations:
    """Return the operations to search for dictionaries that the layers of a block share, where these are swept.

    Args:
        block: `(d_in, d_out)` of its layers.
    """
    # Layers of one shape that read the same input, such as gate and up.
    outputs: dict[int, int] = {}
    for (d_in, d_out), layers in Counter(block).items():
        if layers > 1:
            outputs[d_in] = max(outputs.get(d_in, 0), layers * d_out)
    found = Operations()
    for d_in, together in outputs.items():
        if together >= _LEAST_OUTPUTS * d_in:
            found += Operations(
                products=_SEARCH_PRODUCTS * 2 * d_in**2 * together,
                memory=_SEARCH_PASSES * d_in * together * FLOAT32_BYTES,
            )
    return found
