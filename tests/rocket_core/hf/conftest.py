import pytest

from rocket_core.hf import attach_factors
from tests.reference.factored_models import random_factors
from tests.reference.tiny_models import FAMILIES


@pytest.fixture(scope="package")
def artifacts(tmp_path_factory):
    """For each family: the compressed model in memory, and the folder it was saved to."""
    made = {}
    for family, build in FAMILIES.items():
        model = build()
        attach_factors(model, random_factors(model))
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        made[family] = model, folder
    return made
