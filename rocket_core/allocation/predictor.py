"""A profiled model, and predictions for any ratio, size, bits per weight or error."""

from dataclasses import replace
from typing import Annotated, Any, assert_never

from pydantic import ConfigDict, Field

from rocket_core.allocation import Allocation, Allocator, chosen
from rocket_core.candidates import Candidate, FormatGroup, LayerProfile, SizePoint
from rocket_core.config import CompressionConfig, Objective
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.inspection.checks.feasibility import reach_of_layers
from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.schema import FrozenModel
from rocket_core.sizes.budget import BudgetUnit
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBits, ByBytes, ByError, ByFormat, ByLoss, ByRatio, Target

_FRONTIER_STEPS = 100

# Settings that decide which candidates a job expects a profile to have, before it is made.
_DECISIVE = ("method", "engine", "kinds", "storage", "code_bits", "group_size", "preset")

_Count = Annotated[int, Field(ge=0)]


class ModelProfile(FrozenModel):
    """The layer profiles of a model with their metadata."""

    # Stored profiles call the unit `measure`.
    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    fingerprint: str
    """hash of model, calibration, version and all settings that a profile depends on."""
    model: str
    """folder name or repository id as requested."""
    revision: str
    """commit of the repository, or the hash of the folder's weights."""
    settings: dict[str, Any]
    """the settings that a profile depends on."""
    objective: Objective
    """what the knapsack sums over layers."""
    budget_unit: Annotated[BudgetUnit, Field(alias="measure")]
    """what the budget counts: parameters or bytes."""
    cap_slack: Annotated[float, Field(ge=0)]
    """relative slack on the smallest error cap, for objective `weight`."""
    itemsize: Annotated[int, Field(ge=1)]
    """bytes of a stored number."""
    model_parameters: _Count
    """parameters of the whole model."""
    dense_bytes: _Count
    """bytes of all safetensors of the original."""
    other_bytes: _Count
    """upper bound on the size of the `rocket` artifact without `layers`: embeddings, norms, biases, layers left alone,
    and the names and shapes in the header of each file.
    """
    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1)]
    """profiles, in model order."""
    tables: tuple[LayerProfile, ...] = ()
    """profiles of token embedding and head, where they may be quantized."""
    ratio_counts_tables: bool = False
    """whether a ratio is one of layers and tables together; a size always is."""
    format_groups: tuple[FormatGroup, ...] = ()
    """layers that the engine needs stored in the same way."""
    text: CalibratedText | None = None
    """how well the original predicts the calibration text; None if it does not predict tokens, if no sensitivities were
    measured, and in profiles from before this field existed.
    """

    @property
    def compressible_parameters(self) -> int:
        """Parameters of all profiled layers when dense."""
        return sum(layer.parameters for layer in self.layers)

    def layers_for(self, target: Target | ByError) -> tuple[LayerProfile, ...]:
        """Return the profiles that an allocation for a target decides about: the layers, and perhaps the tables."""
        counts = isinstance(target, ByBytes | ByLoss) or (self.ratio_counts_tables and not isinstance(target, ByFormat))
        return (*self.layers, *self.tables) if counts else self.layers

    def bytes_beside(self, layers: int) -> int:
        """Return the bytes of the artifact other than those of the first layers and tables.

        Args:
            layers: number of layers and tables that an allocation decides about.
        """
        tables = self.tables[: max(0, layers - len(self.layers))]
        return self.other_bytes - sum(table.candidates[0].stored_bytes for table in tables)

    def predictor(self) -> "Predictor":
        """Return a predictor for any ratio, size, bits per weight or error."""
        return Predictor(self)


class Predictor:
    """Predictions about a profiled model; work that does not depend on the question is done once.

    Args:
        profile: the model.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self._accepted = _ratio_of_jobs(profile)
        self._allocator = self._by(profile.budget_unit, profile.layers_for(ByRatio(ratio=0.0)))
        # By the number of layers that they decide about.
        self._by_bytes: dict[int, Allocator] = {}
        self._within_loss: dict[float, Allocation] = {}

    @property
    def reachable_ratio(self) -> float:
        """Largest ratio that can be reached, and that a job with the settings of the profile accepts."""
        return min(self._allocator.reachable_ratio, self._accepted)

    @property
    def smallest_bytes(self) -> int:
        """Bytes of the smallest artifact that can be reached."""
        return self._reach_of_sizes().model_bytes

    @property
    def fewest_bits(self) -> float:
        """Fewest bits per weight that the layers can be stored in, rounded up to hundredths."""
        return self._counting_bytes(self.profile.layers_for(ByBits(bits=1.0))).reach.bits

    def allocate(self, target: Target | ByError) -> Allocation:
        """Return the allocation for a ratio, a size, bits per weight or an error bound.

        Raises:
            InvalidConfigError: the number is out of range.
            InfeasibleBudgetError: no choice of candidates is small enough.
        """
        match target:
            case ByRatio(ratio=ratio):
                return self.at_ratio(ratio)
            case ByBytes(target_bytes=size):
                return self.within_bytes(size)
            case ByBits():
                # The budget then counts bytes, whatever the profile's budget counts.
                allocator = self._counting_bytes(self.profile.layers_for(target))
                return allocator.allocate(allocator.reach.check(target))
            case ByError(error=error):
                return self.within_error(error)
            case ByLoss():
                return self.within_loss(target.nats)
            case ByFormat():
                return self.at_ratio(self._allocator.reach.check(target))
            case _:
                assert_never(target)

    def at_ratio(self, ratio: float) -> Allocation:
        """Return the allocation that a job at this ratio would make; see `Allocator.allocate`.

        Raises:
            InvalidConfigError: the ratio is out of range.
            InfeasibleBudgetError: no choice of candidates is small enough, or a job would be refused.
        """
        if self._accepted < ratio < 1:
            raise InfeasibleBudgetError(
                f"compression ratio {ratio} is out of reach: {self.reachable_ratio} is the largest of this model; ask "
                "for that or less",
                nearest_ratio=self.reachable_ratio,
            )
        return self._allocator.allocate(ratio)

    def within_bytes(self, size: int) -> Allocation:
        """Return the best allocation with which the `rocket` artifact takes at most the given number of bytes.

        The budget then counts bytes, whatever the profile's budget counts.

        Args:
            size: upper bound on the bytes of all safetensors.

        Raises:
            InfeasibleBudgetError: no choice of candidates is small enough.
        """
        target = ByBytes(target_bytes=size)
        allocator = self._counting_bytes(self.profile.layers_for(target))
        return allocator.allocate(self._reach_of_sizes().check(target))

    def within_error(self, error: float) -> Allocation:
        """Return the smallest allocation within reach whose predicted error is at most a bound.

        See `Allocator.within_error`.

        Raises:
            InvalidConfigError: the bound is out of range.
        """
        allocation = self._allocator.within_error(error)
        return allocation if allocation.ratio <= self.reachable_ratio else self.at_ratio(self.reachable_ratio)

    def within_loss(self, nats: float) -> Allocation:
        """Return the smallest allocation in bytes, tables included, whose predicted loss is at most a bound."""
        if nats not in self._within_loss:
            layers = self.profile.layers_for(ByBytes(target_bytes=1))
            self._within_loss[nats] = self._counting_bytes(layers).within_error(nats)
        return self._within_loss[nats]

    def frontier(self) -> tuple[SizePoint, ...]:
        """Return the predicted model at every hundredth, and at the largest ratio that can be reached."""
        steps = (step / _FRONTIER_STEPS for step in range(_FRONTIER_STEPS))
        ratios = sorted({ratio for ratio in steps if ratio <= self.reachable_ratio} | {self.reachable_ratio})
        return self._allocator.frontier(ratios)

    def chosen(self, allocation: Allocation) -> list[tuple[LayerProfile, Candidate]]:
        """Return each layer that an allocation decides about with its candidate, extra nonzeros included."""
        layers = (*self.profile.layers, *self.profile.tables)[: len(allocation.choices)]
        return chosen(layers, allocation, itemsize=self.profile.itemsize)

    def _reach_of_sizes(self) -> Reach:
        layers = self.profile.layers_for(ByBytes(target_bytes=1))
        return replace(self._counting_bytes(layers).reach, other_bytes=self.profile.bytes_beside(len(layers)))

    def _counting_bytes(self, layers: tuple[LayerProfile, ...]) -> Allocator:
        known = self._by_bytes.get(len(layers))
        if known is None:
            same = self.profile.budget_unit == "bytes" and layers == self.profile.layers_for(ByRatio(ratio=0.0))
            known = self._by_bytes[len(layers)] = self._allocator if same else self._by("bytes", layers)
        return known

    def _by(self, budget_unit: BudgetUnit, layers: tuple[LayerProfile, ...]) -> Allocator:
        profile = self.profile
        return Allocator(
            layers,
            objective=profile.objective,
            cap_slack=profile.cap_slack,
            budget_unit=budget_unit,
            itemsize=profile.itemsize,
            format_groups=profile.format_groups,
        )


def _ratio_of_jobs(profile: ModelProfile) -> float:
    """Return the largest ratio that a job with the settings of a profile accepts before it has one.

    Methods that compress all layers alike have no profile to choose from, and their reach is that of the candidates.
    """
    given = {name: profile.settings[name] for name in _DECISIVE if name in profile.settings}
    if given.get("method", "rocket") != "rocket":
        return 1.0
    config = CompressionConfig.model_validate(given | {"budget": profile.budget_unit})
    layers = profile.layers_for(ByRatio(ratio=0.0))
    return reach_of_layers(
        [(layer.d_in, layer.d_out) for layer in layers],
        itemsize=profile.itemsize,
        other_bytes=0,
        quantizes=config.quantizes,
        codes=config.code_choices,
    ).ratio
