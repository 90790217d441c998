"""What an error in each layer's output changes in the model's, by trial: for models without a backward pass."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rocket_core.architectures import oriented_weight
from rocket_core.calibration import Activations
from rocket_core.pipeline.preflight import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.sensitivity import TOKENS_PER_GRADIENT_BATCH
from rocket_core.pipeline.walk import begin_walk, loaded_block, loaded_surroundings, split_windows
from rocket_core.sensitivity import TrialError, final_hidden_states, trial_weight

Weight = Float[Tensor, "d_in d_out"]


def measure_output_changes(
    run: Run,
    tokens: Int64[Tensor, "windows tokens"],
    trials: Callable[[str, Weight], Weight],
    monitor: Monitor,
    *,
    windows: int = 2,
) -> dict[str, float]:
    """Measures what a unit of squared error in each layer's output changes in the model's final hidden states h.

    With one layer's weight W replaced by a trial W~, and S the layer's whitening factor on these windows, it is
    `(1/2 sum ||h~ - h||^2 / tokens) / (||S (W - W~)||_F^2 / rows)`. It takes the place of `Sensitivity.scale` under the
    loss `hidden_states`, to which it tends for small errors that are independent between outputs and between tokens.

    It costs, for n layers, n / 2 + 1 forward passes of the windows, and the memory of one block's weights and of n + 1
    times the windows' hidden states. Nothing is kept on disk: a run that was stopped begins again.

    Args:
        run: the run.
        tokens: calibration windows.
        trials: given a layer's name and weight, on the device, returns its trial weight; the error should be like those
            that compression makes.
        monitor: told of every layer and batch.
        windows: how many windows to use, from the first; >= 1.

    Returns:
        The changes of all layers by name, in model order; zero for a layer that is never called, or whose trial changes
        none of its outputs.

    Raises:
        CompressionCancelledError: the caller wants the run to end.
    """
    batches = split_windows(run, tokens[:windows], TOKENS_PER_GRADIENT_BATCH)
    states = begin_walk(run, batches)
    changed: dict[str, Activations] = {}
    errors: dict[str, TrialError] = {}
    for index, names in enumerate(run.layers):
        monitor.step(index / len(run.layers))
        with loaded_block(run, index) as block:
            for activations in changed.values():
                _pass(activations, block, index, monitor)
            for name in names:
                module = run.architecture.model.get_submodule(name)
                changed[name] = Activations(hidden=list(states.hidden), calls=states.calls)
                with trial_weight(module, trials(name, oriented_weight(module))) as errors[name]:
                    _pass(changed[name], block, index, monitor)
            _pass(states, block, index, monitor)
    with loaded_surroundings(run, head=False) as model:
        blocks = run.architecture.blocks
        total = dict.fromkeys(changed, 0.0)
        for batch, text in enumerate(batches):
            monitor.pulse()
            dense = final_hidden_states(model, blocks, text, states.hidden[batch])
            for name, activations in changed.items():
                final = final_hidden_states(model, blocks, text, activations.hidden[batch])
                total[name] += float((final - dense).double().square().sum())
    used = sum(text.numel() for text in batches)
    return {name: _per_error(0.5 * total[name] / used, errors[name]) for name in changed}


def _pass(activations: Activations, block: torch.nn.Module, index: int, monitor: Monitor) -> None:
    for batch in range(len(activations.hidden)):
        monitor.pulse()
        activations.step(block, index, batch)


def _per_error(change: float, error: TrialError) -> float:
    return change * error.rows / error.squared if error.squared else 0.0
