"""A job of the real service as its user sees it, and what must hold for it in the end."""

from collections import Counter

BLOCKS, LAYERS = 3, 21
"""Number of blocks and layers of the model that services offer here."""
REQUEST = {
    "model_id": "local/tiny-llama",
    "ratio": 0.3,
    "calibration": {"samples": 8, "sequence_length": 128},
    "options": {"export": ["rocket", "dense"]},
}


def events_of(service, job_id):
    found = []
    while (
        page := service.client.get(f"/jobs/{job_id}/events", params={"after": len(found), "limit": 100})
        .raise_for_status()
        .json()["data"]
    ):
        found += page
    return found


def has_told(service, job_id, count):
    return service.client.get(f"/jobs/{job_id}/events", params={"after": count - 1, "limit": 1}).json()["data"]


def assert_whole(service, job_id, hashes):
    """Check what must hold for a job that has succeeded, whatever happened to it."""
    assert service.hashes(job_id) == hashes
    events = events_of(service, job_id)
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    profiled = [event["data"]["layer"] for event in events if event["type"] == "layer"]
    assert len(profiled) == len(set(profiled)) == LAYERS
    assert [event["type"] for event in events].count("allocation") == 1
    layers = service.client.get(f"/jobs/{job_id}/layers").json()["data"]
    report = service.client.get(f"/jobs/{job_id}/report").json()
    assert [layer["name"] for layer in layers] == [layer["name"] for layer in report["layers"]]
    leaders = {layer["name"]: layer for layer in layers if layer["shared"]}
    allocated, stored_in = Counter(), Counter()
    for layer, told in zip(layers, report["layers"], strict=True):
        shared = leaders.get(layer["input_group"], {"shared": []})["shared"]
        offered = layer["candidates"] + [member for together in shared for member in together["members"]]
        assert any(is_made_from(layer["chosen"], candidate) for candidate in offered)
        assert layer["chosen"]["rank"] == told["rank"]
        # Layers with a shared dictionary choose their nonzeros together, as many as allocated to all of them.
        unit = layer["chosen"]["dictionary"] or layer["name"]
        allocated[unit] += layer["chosen"]["nnz"] or 0
        stored_in[unit] += told["nnz"] or 0
    assert stored_in == allocated
    stored = {path.name for path in (service.data_dir / "artifacts").iterdir()}
    assert len(stored) == len(service.client.get(f"/jobs/{job_id}/artifacts").json()["data"])
    assert list((service.data_dir / "work").iterdir()) == []


def is_made_from(chosen, candidate):
    """Return whether they are the same, except for the nonzeros on which the rest of the budget was spent."""
    grown = {"nnz", "kept_parameters", "stored_bytes"}
    return all(value == candidate[name] for name, value in chosen.items() if name not in grown) and all(
        candidate[name] is None or chosen[name] >= candidate[name] for name in grown
    )
