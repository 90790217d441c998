"""Targets: one type inside, two nullable members at each boundary."""

import pytest

from app.shared.requests import AllocationRequest, CompressionRequest, JobRequest
from rocket_core.config import CompressionConfig, compression_config
from rocket_core.errors import InvalidConfigError
from rocket_core.target import ByBytes, ByError, ByRatio, target_of

BOUNDARIES = [
    ({"ratio": 0.3}, ByRatio(ratio=0.3)),
    ({"ratio": 0.0}, ByRatio(ratio=0.0)),
    ({"target_bytes": 1000}, ByBytes(target_bytes=1000)),
    ({}, None),
]


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_two_members_become_one_target(members, target):
    assert target_of(members.get("ratio"), members.get("target_bytes")) == target


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_settings_have_the_target_of_their_members(members, target):
    config = compression_config(**members)
    assert config.target == target
    assert CompressionConfig.model_validate_json(config.model_dump_json()).target == target
    assert "target" not in config.model_dump()


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_a_request_has_the_target_of_its_members(members, target):
    request = JobRequest.model_validate({"model_id": "local/m"} | members)
    assert request.target == request.compression_config().target == target
    assert request.kind == ("profile" if target is None else "compression")
    assert "target" not in request.model_dump()


def test_a_ratio_and_a_size_are_not_both_a_target():
    both = {"ratio": 0.3, "target_bytes": 1000}
    with pytest.raises(ValueError, match="either ratio or target_bytes"):
        target_of(**both)
    with pytest.raises(InvalidConfigError, match="either ratio or target_bytes"):
        compression_config(**both)
    with pytest.raises(ValueError, match="either ratio or target_bytes"):
        CompressionRequest.model_validate({"model_id": "local/m"} | both)


@pytest.mark.parametrize(
    ("members", "target"),
    [
        ({"ratio": 0.0}, ByRatio(ratio=0.0)),
        ({"model_bytes": 0}, ByBytes(target_bytes=0)),
        ({"error": 0.0}, ByError(error=0.0)),
    ],
)
def test_a_prediction_has_one_target_of_three(members, target):
    assert AllocationRequest.model_validate(members).target == target
