"""What the service answers about profiles, typed."""

from datetime import datetime

from pydantic import JsonValue

from rocket_client.resources import Calibration, Candidate, Resource


class Profile(Resource):
    """What is known of a model before a ratio is chosen.

    Attributes:
        id: its name.
        model_id: the model, as the job that made it named it.
        calibration: the calibration data.
        options: settings of that job, by name.
        layers: how many are profiled.
        reachable_ratio: the largest ratio that can be reached.
        created_at: when it was made.
        used_at: when a job last made or found it.
    """

    id: str
    model_id: str
    calibration: Calibration
    options: dict[str, JsonValue]
    layers: int
    reachable_ratio: float
    created_at: datetime
    used_at: datetime


class ProfilePage(Resource):
    """Some profiles, newest first.

    Attributes:
        data: the profiles.
        has_more: whether there are older ones.
        last_id: what to list `after` for these.
    """

    data: tuple[Profile, ...]
    has_more: bool
    last_id: str | None = None


class Size(Resource):
    """A model at one ratio, as its profile predicts it.

    Attributes:
        ratio: fraction removed, of what the budget counts.
        kept_parameters: what is left of the compressible parameters.
        stored_bytes: of the compressible layers.
        model_bytes: of all weights.
        error: in the measure of the profile's objective.
    """

    ratio: float
    kept_parameters: int
    stored_bytes: int
    model_bytes: int
    error: float


class Frontier(Resource):
    """A model at all ratios.

    Attributes:
        objective: what errors are: `fisher` (nats per token), `whitened` or `weight`.
        budget: what ratios are fractions of: parameters or bytes.
        compressible_parameters: of the profiled layers as they are.
        dense_bytes: of all weights as they are.
        data: by rising ratio.
    """

    objective: str
    budget: str
    compressible_parameters: int
    dense_bytes: int
    data: tuple[Size, ...]


class LayerChoice(Resource):
    """What a layer would get.

    Attributes:
        name: module name.
        chosen: its candidate.
    """

    name: str
    chosen: Candidate


class PredictedAllocation(Size):
    """An allocation that nobody has carried out.

    Attributes:
        budget: what `ratio` is a fraction of; bytes where a size was asked for.
        proven: whether no other choice of candidates has less error.
        layers: what each would get, in the order of the model.
    """

    budget: str
    proven: bool
    layers: tuple[LayerChoice, ...]
