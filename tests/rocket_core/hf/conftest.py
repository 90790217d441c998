import pytest

from rocket_core.hf import attach_factors
from tests.reference.factored_models import ARTIFACTS


@pytest.fixture(scope="package")
def artifacts(tmp_path_factory):
    """Return for each of `ARTIFACTS` the compressed model in memory, and the folder it was saved to."""
    made = {}
    for name, (build, make_factors) in ARTIFACTS.items():
        model = build()
        attach_factors(model, make_factors(model))
        folder = tmp_path_factory.mktemp(name.replace(", ", "-").replace(" ", "-"))
        model.save_pretrained(folder)
        made[name] = model, folder
    return made
