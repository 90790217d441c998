"""For all tests."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # The models are tiny: a second thread would only spin, and the fewer the cores the more it costs.
    torch.set_num_threads(1)
