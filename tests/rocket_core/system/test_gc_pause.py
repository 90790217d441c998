import gc

import pytest

from rocket_core.system.gc_pause import no_collection


@pytest.fixture(autouse=True)
def _restored_collection():
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_paused_and_restored(enabled):
    (gc.enable if enabled else gc.disable)()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_collection_is_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), no_collection():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_only_lasting_objects_are_frozen():
    before = gc.get_freeze_count()
    with no_collection():
        passing = [[]]
    assert gc.get_freeze_count() <= before
    with no_collection(lasting=True):
        lasting = [[]]
    assert gc.get_freeze_count() > before
    assert not any(found is lasting or found is passing for found in gc.get_objects())
