"""Figures of `method.md`, drawn from a real compression of the bundled model: `python docs/draw_figures.py`.

The program also prints the numbers that the text quotes. It takes a minute or two on one core, and draws the same files
in every run on the same machine.
"""

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

# Draw to files only, with or without a display.
mpl.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from rocket_core.allocation import Allocation
from rocket_core.allocation.predictor import ModelProfile, Predictor
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import compression_config
from rocket_core.pipeline import Observer, compress

FOLDER = Path(__file__).parent / "figures"
MODEL = Path(__file__).parents[1] / "examples" / "tiny-llama"
RATIO = 0.5
CALIBRATION = {"samples": 64, "sequence_length": 256}
LAYER = "model.layers.3.mlp.down_proj"
# All layers except that one.
OTHERS = ("model.layers.[0124-9].*", "*.self_attn.*", "*.gate_proj", "*.up_proj")

_LABELS = {"low_rank": "low-rank", "factored": "dictionary", "shared": "shared dictionary", "sparse": "sparse"}
# By Okabe and Ito, distinguishable with colour blindness.
_COLOURS = {"low_rank": "#E69F00", "factored": "#0072B2", "shared": "#CC79A7", "sparse": "#009E73"}
# Light, so that the text on it is legible.
_SHADES = LinearSegmentedColormap.from_list("kept", ["#FFFFFF", "#56B4E9"])
_MARKERS = {"low_rank": "s", "factored": "o", "shared": "D", "sparse": "^"}
_SHORT = {"dense": "dense", "low_rank": "low-rank", "factored": "dict.", "shared": "shared", "sparse": "sparse"}

Chosen = Sequence[tuple[LayerProfile, Candidate]]


def main() -> None:
    """Compress the model, draw the figures and print the numbers."""
    profile, tokens = profiled()
    # The search of the default run leaves these kinds out, because pruning is far better on this model.
    alone = {kind: profiled(kinds=(kind,), ignore=OTHERS)[0].layers[0] for kind in ("low_rank", "factored")}
    predictor = profile.predictor()
    allocation = predictor.at_ratio(RATIO)
    draw(predictor, allocation, FOLDER, alone)
    numbers = {
        "calibration_tokens": tokens,
        "layers": len(profile.layers),
        "candidates": sum(len(layer.candidates) + len(layer.shared) for layer in profile.layers),
        "budget": allocation.budget,
        "kept": allocation.kept,
        "total_error": allocation.total_error,
        "proven": allocation.proven,
        "kinds": _counted([_kind(candidate) for _, candidate in predictor.chosen(allocation)]),
        "reachable_ratio": predictor.reachable_ratio,
        "uniform_error": uniform_error(profile.layers, RATIO),
    }
    sys.stdout.write(json.dumps(numbers, indent=2) + "\n")


class _Profile(Observer):
    """Observer that keeps the profile."""

    profile: ModelProfile | None = None

    def on_profiled(self, profile: ModelProfile) -> None:
        """Keep it."""
        self.profile = profile


def profiled(**settings: object) -> tuple[ModelProfile, int]:
    """Compress the model, and return its profile and the number of calibration tokens.

    Args:
        settings: further settings of the compression.
    """
    noted = _Profile()
    with tempfile.TemporaryDirectory() as folder:
        config = compression_config(ratio=RATIO, calibration=CALIBRATION, export=("rocket",), **settings)
        report = compress(str(MODEL), Path(folder) / "out", config, observer=noted)
    assert noted.profile is not None
    return noted.profile, report.calibration.tokens


def draw(predictor: Predictor, allocation: Allocation, folder: Path, alone: Mapping[str, LayerProfile]) -> None:
    """Draw all figures into a folder.

    Args:
        predictor: the profiled model.
        allocation: one of its allocations.
        folder: target folder.
        alone: by kind, the profile of one layer with candidates of only that kind.
    """
    # Keep text as text, and avoid random identifiers.
    mpl.rcParams.update({"svg.hashsalt": "rocket", "svg.fonttype": "none", "font.size": 11})
    folder.mkdir(parents=True, exist_ok=True)
    chosen = predictor.chosen(allocation)
    [name] = {profile.name for profile in alone.values()}
    [profile] = [layer for layer in predictor.profile.layers if layer.name == name]
    [mine] = [candidate for layer, candidate in chosen if layer.name == name]
    _save(
        folder / "candidates.svg",
        (7, 4.6),
        lambda axes: _draw_candidates(
            axes, {"sparse": profile, **alone}, mine, f"chosen at ratio {allocation.ratio:g}"
        ),
    )
    _save(folder / "allocation.svg", (8.6, 4.2), lambda axes: _draw_map(axes, chosen))
    _save(folder / "frontier.svg", (7, 4.2), lambda axes: _draw_frontier(axes, predictor, allocation))


def uniform_error(profiles: Sequence[LayerProfile], ratio: float) -> float:
    """Return the sum of errors if every layer is compressed at the ratio by itself, with its best candidate.

    It is infinite if a layer has no candidate that small.
    """

    def least(profile: LayerProfile) -> float:
        most = (1 - ratio) * profile.parameters
        return min((c.loss or 0.0 for c in profile.candidates if c.kept_parameters <= most), default=math.inf)

    return sum(map(least, profiles))


def _save(file: Path, size: tuple[float, float], paint: Any) -> None:
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    paint(axes)
    # Without a date, so that equal runs draw equal files.
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _draw_candidates(axes: Axes, profiles: Mapping[str, LayerProfile], chosen: Candidate, label: str) -> None:
    """Draw error over kept parameters of one layer's candidates of each kind, their hull, and the chosen candidate."""
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, profile in profiles.items():
        for candidate in profile.candidates:
            if candidate.kind == kind and candidate.loss:
                found.setdefault(kind, []).append((candidate.kept_parameters / profile.parameters, candidate.loss))
    for kind, points in found.items():
        style = {"marker": _MARKERS[kind], "color": _COLOURS[kind], "linestyle": "none"}
        axes.plot(*zip(*points, strict=True), label=_LABELS[kind], **style)
    hull = _lower_hull([point for points in found.values() for point in points])
    axes.plot(*zip(*hull, strict=True), color="#555555", linewidth=1, zorder=1, label="lower convex hull")
    if chosen.loss:
        parameters = next(iter(profiles.values())).parameters
        _ring(axes, (chosen.kept_parameters / parameters, chosen.loss), label)
    axes.set_yscale("log")
    axes.set_xlabel("kept parameters, as a part of the layer's")
    axes.set_ylabel("expected increase of the loss, nats per token")
    axes.set_title(next(iter(profiles.values())).name, fontsize=11)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, fontsize=10)


def _ring(axes: Axes, point: tuple[float, float], label: str) -> None:
    style = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgecolor": "#D55E00"}
    axes.plot([point[0]], [point[1]], linestyle="none", markeredgewidth=2, label=label, **style)


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the falling part of the lower convex hull, on linear scales."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull


def _draw_map(axes: Axes, chosen: Chosen) -> None:
    """Draw kept fraction and kind of every layer, with a row per block and a column per projection."""
    cells: dict[str, dict[str, tuple[float, str]]] = {}
    for profile, candidate in chosen:
        block, name = _block_and_name(profile.name)
        cells.setdefault(block, {})[name] = (candidate.kept_parameters / profile.parameters, _kind(candidate))
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    parts = [[row.get(name, (float("nan"), ""))[0] for name in names] for row in cells.values()]
    image = axes.imshow(parts, cmap=_SHADES, vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(cells.values()):
        for x, name in enumerate(names):
            if name in row:
                part, kind = row[name]
                axes.text(x, y, f"{part:.0%}\n{_SHORT[kind]}", ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(cells)), list(cells))
    axes.set_ylabel("block")
    axes.figure.colorbar(image, ax=axes, label="kept parameters, as a part of the layer's")


def _draw_frontier(axes: Axes, predictor: Predictor, allocation: Allocation) -> None:
    """Draw the predicted error of the model over its ratio."""
    points = [(point.ratio, point.error) for point in predictor.frontier() if point.error > 0]
    axes.plot(*zip(*points, strict=True), color=_COLOURS["factored"], label="one knapsack over all layers")
    ratios = [step / 20 for step in range(2, 15)]
    uniform = [(ratio, uniform_error(predictor.profile.layers, ratio)) for ratio in ratios]
    axes.plot(
        *zip(*((ratio, error) for ratio, error in uniform if math.isfinite(error)), strict=True),
        color="#777777",
        linestyle="--",
        label="every layer at the same ratio",
    )
    _ring(axes, (allocation.ratio, allocation.total_error), f"ratio {allocation.ratio:g}")
    axes.set_yscale("log")
    axes.set_xlabel("compression ratio (parameters)")
    axes.set_ylabel("predicted increase of the loss, nats per token")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(frameon=False, fontsize=10)


def _kind(candidate: Candidate) -> str:
    return candidate.kind if candidate.dictionary is None else "shared"


def _counted(words: Sequence[str]) -> Mapping[str, int]:
    return {word: words.count(word) for word in sorted(set(words))}


def _block_and_name(layer: str) -> tuple[str, str]:
    parts = layer.split(".")
    return next((part for part in parts if part.isdecimal()), ""), parts[-1]


if __name__ == "__main__":
    main()
