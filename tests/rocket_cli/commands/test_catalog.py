"""Commands that list available names."""

import json

import pytest


def test_models_are_listed_by_the_names_submit_takes(remote):
    assert remote("models").out == "local/tiny\n"
    assert json.loads(remote("models", "--json").out) == {"data": [{"id": "local/tiny"}]}


def test_a_server_without_models_says_so(remote, service):
    (service.settings.models_folder / "tiny").unlink()

    outcome = remote("models")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == "rocket: the server has no local models\n"
    assert json.loads(remote("models", "--json").out) == {"data": []}


def test_calibration_data_is_listed_with_uploads(remote, client, tmp_path):
    (tmp_path / "own.txt").write_text("text\n")
    kept = client.upload(tmp_path / "own.txt")

    names = remote("calibrations").out.splitlines()
    assert {"builtin", "wikitext2", "local/mine.jsonl", kept.id} <= set(names)
    assert [row["id"] for row in json.loads(remote("calibrations", "--json").out)["data"]] == names


def test_profiles_are_a_table(remote, client, service):
    profile_id = service.profile_model(service.claim(service.submit()))

    header, row = remote("profiles").out.splitlines()
    assert header.split() == ["profile", "model", "calibration", "layers", "up", "to", "age", "used"]
    assert row.split()[:6] == [profile_id, "local/tiny", "builtin,", "256", "2", "59.4%"]
    assert json.loads(remote("profiles", "--json").out) == client.list_profiles().model_dump(mode="json")
    assert remote("profiles", "--after", profile_id).err.startswith("rocket: no profiles")


def test_older_profiles_can_be_listed(remote, service):
    jobs = [service.submit(calibration={"seed": seed}) for seed in range(2)]
    older, newer = (service.profile_model(service.claim(job_id), str(seed) * 64) for seed, job_id in enumerate(jobs))

    outcome = remote("profiles", "--limit", "1")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == [newer]
    assert outcome.err == f"rocket: older ones: rocket profiles --after {newer}\n"
    assert older in remote("profiles", "--after", newer).out


@pytest.mark.parametrize("command", ["models", "calibrations", "profiles"])
def test_errors_are_json_for_programs(rocket, command):
    outcome = rocket(command, "--json", "--server", "nowhere")

    assert outcome.code == 2
    assert json.loads(outcome.out)["error"]["code"] == "invalid_argument"
