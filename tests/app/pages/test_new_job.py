"""The form for a new job: its preview, and the job that it creates."""

import html
import re
from urllib.parse import parse_qsl

import pytest

from tests.reference.safetensors_files import save_llama

FIELDS = {
    "model_id": "local/tiny",
    "target": "ratio",
    "ratio": "0.3",
    "dataset": "builtin",
    "samples": "8",
    "preset": "fast",
    "export": "both",
}


@pytest.fixture
def submit(page):
    return lambda **changes: page("POST", "/ui/new", data=FIELDS | changes)


def test_the_form_lists_models_and_calibrations(page):
    text = page("GET", "/ui/new?model_id=local/tiny&ratio=0.55&preset=best").text
    assert '<option value="local/tiny"></option>' in text
    assert "<option>local/mine.jsonl</option>" in text
    assert 'name="ratio" min="0" max="0.7" step="0.01" value="0.55"' in text
    assert '<option value="best" selected>' in text


def test_submitting_the_form_creates_one_job(submit, client, page):
    key = re.search(r'name="form" value="([^"]+)"', page("GET", "/ui/new").text)[1]
    answers = [submit(form=key, evaluate="yes", ignore="*.down_proj, *.up_proj", label="mine") for _ in range(2)]
    assert {answer.status_code for answer in answers} == {303}
    assert len({answer.headers["Location"] for answer in answers}) == 1
    [job] = client.get("/jobs").json()["data"]
    assert answers[0].headers["Location"] == f"/ui/jobs/{job['id']}"
    assert (job["ratio"], job["calibration"]["samples"], job["metadata"]) == (0.3, 8, {"label": "mine"})
    assert job["options"]["ignore"] == ["*.down_proj", "*.up_proj"]
    assert job["evaluate"]["dataset"] == "builtin"


def test_prompts_ask_for_an_evaluation_and_are_kept(submit, client, page):
    made = submit(prompts="One\n\n Two ").headers["Location"]
    [job] = client.get("/jobs").json()["data"]
    assert job["evaluate"]["prompts"] == ["One", "Two"]
    again = re.search(r'href="(/ui/new\?[^"]+)">New job with these settings', page("GET", made).text)[1]
    assert re.search(r'<textarea id="prompts"[^>]*>One\nTwo</textarea>', page("GET", html.unescape(again)).text)
    refused = submit(prompts="x\n" * 17)
    assert 'id="problem-prompts"' in refused.text


@pytest.mark.parametrize(
    ("fields", "exports"),
    [
        ({"export": ""}, ["rocket"]),
        ({"export": "both"}, ["rocket", "dense"]),
        ({"export": "dense"}, ["dense"]),
        ({"export": "", "engine": "vllm", "target": "bits", "bits": "5"}, ["compressed-tensors"]),
    ],
)
def test_the_form_asks_for_one_export_unless_told(submit, client, fields, exports):
    answer = submit(**fields)
    jobs = client.get("/jobs").json()["data"]
    if fields.get("engine") == "vllm":
        # The tiny model is stored in 32 bits, which vLLM does not run.
        assert "16 bits" in answer.text
    else:
        assert [job["options"]["export"] for job in jobs] == [exports]


@pytest.mark.parametrize(
    "fields",
    [
        {"export": "both", "ignore": "*.down_proj *.up_proj"},
        {"export": "dense"},
        {"target": "size", "size": "90kB", "include": "embeddings"},
        {"target": "size", "size": "90kB", "include": "none"},
    ],
)
def test_another_job_can_have_the_same_settings(submit, client, page, fields):
    made = submit(**fields).headers["Location"]
    again = re.search(r'href="/ui/new\?([^"]+)">New job with these settings', page("GET", made).text)[1]
    kept = {name: value for name, value in parse_qsl(html.unescape(again)) if name != "samples"}
    assert submit(**fields | kept | {"form": "again"}).status_code == 303
    first, second = (job["options"] | {"bytes": job["target_bytes"]} for job in client.get("/jobs").json()["data"])
    assert first == second


def test_a_job_without_calibration_is_asked_for_and_refused(submit, client, page):
    made = submit(preset="instant", samples="256", target="bits", bits="6").headers["Location"]
    [job] = client.get("/jobs").json()["data"]
    assert (job["options"]["preset"], job["options"]["objective"], job["bits"]) == ("instant", "prior", 6)
    text = page("GET", made).text
    assert re.search(r">calibration</th><td>none</td>", text)
    assert "measuring sensitivity" not in text
    assert "reads no calibration data" in submit(preset="instant", samples="8", target="bits", bits="6").text


def test_only_an_unreachable_ratio_is_answered_with_another(page):
    previews = {
        target: page("POST", "/ui/new/preview", data=FIELDS | {"target": target, target: value}).text
        for target, value in (("ratio", "0.999"), ("size", "1kB"), ("bits", "0.01"))
    }
    for target, text in previews.items():
        assert "out of reach" in text
        assert ("Largest reachable ratio" in text) == (target == "ratio")


@pytest.mark.parametrize(("fields", "measured"), [({}, False), ({"benchmark": "yes"}, True)])
def test_a_benchmark_can_be_requested(submit, client, page, fields, measured):
    assert submit(**fields).status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert job["benchmark"] is measured
    stages = page("GET", f"/ui/jobs/{job['id']}").text
    assert ("measuring speed" in stages) is measured
    assert ("benchmark=yes" in stages) is measured, "another job with these settings"


def test_bounds_are_sent_with_an_evaluation_and_kept(submit, client, page):
    made = submit(evaluate="yes", accept_kl="0.05", accept_perplexity_increase="0.02").headers["Location"]
    [job] = client.get("/jobs").json()["data"]
    assert job["accept"] == {"max_kl": 0.05, "max_perplexity_increase": 0.02, "max_task_drop": None}
    again = re.search(r'href="(/ui/new\?[^"]+)">New job with these settings', page("GET", made).text)[1]
    form = page("GET", html.unescape(again)).text
    assert re.search(r'name="accept_kl"[^>]* value="0.05"', form)
    assert re.search(r'name="accept_perplexity_increase"[^>]* value="0.02"', form)


@pytest.mark.parametrize(
    ("loss", "measure", "member", "bound"),
    [("0.02", "max_kl", "max_kl", 0.02), ("2", "max_perplexity_increase", "max_perplexity_increase", 0.02)],
)
def test_a_loss_can_be_the_target(submit, client, page, loss, measure, member, bound):
    made = submit(target="loss", loss=loss, loss_measure=measure).headers["Location"]
    [job] = client.get("/jobs").json()["data"]
    assert (job[member], job["ratio"], job["evaluate"]["dataset"]) == (bound, None, "builtin")
    text = page("GET", made).text
    assert ("KL at most 0.02" if measure == "max_kl" else "at most 2.0% more perplexity") in text
    again = re.search(r'href="(/ui/new\?[^"]+)">New job with these settings', text)[1]
    form = page("GET", html.unescape(again)).text
    assert re.search(rf'name="loss"[^>]* value="{float(loss):g}(\.0)?"', form)
    assert re.search(rf'<option value="{measure}" selected', form)
    assert re.search(r'id="target-loss"[^>]* checked', form)


def test_a_memory_with_a_context_can_be_the_target(submit, client, page, settings):
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 320}
    save_llama(settings.models_folder / "full", config=sizes)
    memory = {"model_id": "local/full", "target": "fit", "fit": "1.99MB", "context": "16", "batch": "2", "export": ""}
    preview = html.unescape(page("POST", "/ui/new/preview", data=FIELDS | memory).text)
    rows = dict(re.findall(r"<tr><th scope=\"row\">([^<]+)</th><td class=\"number\">([^<]+)</td></tr>", preview))
    assert [*rows] == [
        *("weights", "keys and values of 2 times 16 tokens", "allowance for Transformers (Rocket)"),
        *("total", "asked for"),
    ]
    assert rows["total"] == rows["asked for"] == "1.99 MB"
    made = submit(**memory).headers["Location"]
    [job] = client.get("/jobs").json()["data"]
    assert job["fit"] == {"memory_bytes": 1_990_000, "context": 16, "batch": 2, "kv_bits": None}
    text = page("GET", made).text
    assert "in 1.99 MB with 2 times 16 tokens" in text
    again = re.search(r'href="(/ui/new\?[^"]+)">New job with these settings', text)[1]
    form = page("GET", html.unescape(again)).text
    assert re.search(r'id="target-fit"[^>]* checked', form)
    for name, value in {"fit": "1990000", "context": "16", "batch": "2"}.items():
        assert re.search(rf'name="{name}"[^>]* value="{value}"', form)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"context": ""}, "context"), ({"fit": "much"}, "fit"), ({"kv_bits": "5"}, "kv_bits"), ({"batch": "0"}, "batch")],
)
def test_faults_of_a_memory_are_shown_at_its_fields(submit, changes, field):
    answer = submit(**{"target": "fit", "fit": "10.3MB", "context": "16"} | changes)
    assert answer.status_code == 422
    assert f'id="problem-{field}"' in answer.text


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"target": "loss", "loss": "0"}, "loss", "greater than 0"),
        ({"target": "loss", "loss": "much"}, "loss", "valid number"),
        ({"target": "loss", "loss": "150", "loss_measure": "max_perplexity_increase"}, "loss", "less than 1"),
        ({"accept_kl": "0.1"}, "evaluate", "needs it measured; choose this as well"),
        ({"evaluate": "yes", "accept_kl": "0"}, "accept_kl", "greater than 0"),
        ({"evaluate": "yes", "accept_perplexity_increase": "2"}, "accept_perplexity_increase", "write 0.02"),
    ],
)
def test_bounds_that_mean_nothing_are_marked(submit, client, fields, field, said):
    answer = submit(**fields)
    assert answer.status_code == 422
    assert re.search(rf'id="problem-{field}">[^<]*{said}', answer.text)
    assert client.get("/jobs").json()["data"] == []


def test_a_changed_form_creates_another_job(submit, client, page):
    first = submit(form="once")
    # Back, another ratio, and the same button; or the other one.
    assert submit(form="once", ratio="0.4").headers["Location"] != first.headers["Location"]
    assert page("POST", "/ui/new/profile", data=FIELDS | {"form": "once"}).status_code == 303
    assert len(client.get("/jobs").json()["data"]) == 3


def test_a_size_replaces_the_ratio(submit, client):
    assert submit(target="size", size="90kB").status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert (job["ratio"], job["target_bytes"], job["options"]["budget"]) == (None, 90_000, "bytes")


def test_bits_replace_the_ratio(submit, client):
    assert submit(target="bits", bits="4.5", size="90kB").status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert (job["ratio"], job["target_bytes"], job["bits"]) == (None, None, 4.5)
    assert job["options"]["budget"] == "bytes"


def test_the_form_leads_with_a_size(page):
    text = page("GET", "/ui/new").text
    assert text.index("Fit into a size") < text.index("Bits per weight") < text.index("Remove a fraction")
    assert 'id="target-size" name="target" value="size" checked' in text
    # A link with a ratio means the ratio.
    assert 'id="target-ratio" name="target" value="ratio" checked' in page("GET", "/ui/new?ratio=0.5").text
    assert 'id="target-bits" name="target" value="bits" checked' in page("GET", "/ui/new?bits=4.5").text
    assert 'id="target-size" name="target" value="size" checked' in page("GET", "/ui/new?size=1GB&bits=4").text


@pytest.mark.parametrize("target", ["size", "bits"])
def test_the_preview_shows_the_size_to_fit_before_one_is_given(page, target):
    text = page("POST", "/ui/new/preview", data=FIELDS | {"target": target, target: ""}).text
    assert "enter the size that it is to fit into" in text
    assert "notice bad" not in text


def test_a_profile_for_sizes_serves_bits(page, client, worker):
    size = {"target": "size", "size": "90kB"}
    assert page("POST", "/ui/new/profile", data=FIELDS | size).status_code == 303
    [job] = client.get("/jobs").json()["data"]
    profile = worker.profile_model(job["id"])
    text = page("POST", "/ui/new/preview", data=FIELDS | {"target": "bits", "bits": "15"}).text
    assert f"/ui/profiles/{profile}" in text
    assert "predicted from its profile" in text


def test_a_profile_for_sizes_is_found_by_sizes_alone(page, client, worker):
    fields = FIELDS | {"target": "size", "size": "90kB"}
    assert page("POST", "/ui/new/profile", data=fields).status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert job["options"]["budget"] == "bytes"
    profile = worker.profile_model(job["id"])
    assert f"/ui/profiles/{profile}" in page("POST", "/ui/new/preview", data=fields).text
    assert profile not in page("POST", "/ui/new/preview", data=FIELDS).text


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"ratio": "2"}, 422, "less than 1"),
        ({"ratio": ""}, 422, "specify one of ratio, target_bytes, bits, fit, max_kl and"),
        ({"target": "size", "size": "much"}, 422, "is not a size; use a number of bytes"),
        ({"target": "size", "size": "50%"}, 422, "or give a ratio: 50% is removed then"),
        ({"target": "size", "size": "3"}, 422, "write for example 3MB or 3GB"),
        ({"target": "size", "size": "1kB"}, 422, "1kB is out of reach"),
        ({"target": "bits", "bits": "17"}, 422, "less than or equal to 16"),
        ({"target": "bits", "bits": "0"}, 422, "greater than 0"),
        ({"target": "bits", "bits": "0.5"}, 422, "0.5 bits per weight are out of reach"),
        ({"target": "bits", "bits": "many"}, 422, "valid number"),
        ({"target": "bits", "bits": ""}, 422, "specify one of ratio, target_bytes, bits, fit, max_kl and"),
        ({"model_id": "tiny"}, 422, "is not a valid model id"),
        ({"model_id": "local/none"}, 422, "the form of a new job lists"),
        ({"samples": "many"}, 422, "integer"),
        ({"dataset": "local/none.txt"}, 422, "calibration"),
        ({"ignore": "*.q_proj *.dwn_proj"}, 422, "pattern 2 of 2 matches no layer of local/tiny; did you mean '*.down"),
    ],
)
def test_form_errors_are_shown_with_the_input(submit, client, changes, status, said):
    answer = submit(**changes)
    assert answer.status_code == status
    assert 'role="alert"' in answer.text
    assert said in html.unescape(answer.text)
    for name, value in changes.items():
        if name != "target" and value:
            assert f'value="{value}"' in answer.text or f"<option selected>{value}" in answer.text or name == "dataset"
    assert client.get("/jobs").json()["data"] == []


def test_the_preview_estimates_a_job_without_creating_one(page, client):
    text = page("POST", "/ui/new/preview", data=FIELDS).text
    assert "parameters" in text
    assert "unknown until the layers are profiled" in text
    assert client.get("/jobs").json()["data"] == []
    assert "Enter a model" in page("POST", "/ui/new/preview", data=FIELDS | {"model_id": ""}).text
    assert "ask for 0.7001 or less" in page("POST", "/ui/new/preview", data=FIELDS | {"ratio": "0.95"}).text
    assert "less than 1" in page("POST", "/ui/new/preview", data=FIELDS | {"ratio": "2"}).text


def test_with_a_profile_the_preview_shows_its_figures(page, client, worker, submit):
    submit()
    [job] = client.get("/jobs").json()["data"]
    profile = worker.profile_model(job["id"])
    text = page("POST", "/ui/new/preview", data=FIELDS | {"ratio": "0.25"}).text
    assert f"/ui/profiles/{profile}" in text
    assert 'data-figure="size-frontier"' in text
    assert 'data-figure="allocation-map"' in text
    # It does not apply to another calibration.
    assert profile not in page("POST", "/ui/new/preview", data=FIELDS | {"samples": "9"}).text
    # Options that a profile does not depend on make no difference.
    assert profile in page("POST", "/ui/new/preview", data=FIELDS | {"export": "rocket"}).text


def test_a_model_can_be_profiled_alone(page, client):
    answer = page("POST", "/ui/new/profile", data=FIELDS | {"ratio": "nonsense"})
    assert answer.status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert (job["kind"], job["ratio"]) == ("profile", None)
    assert "profile only" in page("GET", "/").text


def test_a_profile_page_answers_for_any_ratio(page, client, worker, submit):
    assert "No profiles yet" in page("GET", "/ui/profiles").text
    submit()
    [job] = client.get("/jobs").json()["data"]
    profile = worker.profile_model(job["id"])
    assert f"/ui/profiles/{profile}" in page("GET", "/ui/profiles").text
    text = page("GET", f"/ui/profiles/{profile}?ratio=0.2").text
    assert "Compress at 0.2" in text
    part = page("GET", f"/ui/profiles/{profile}/what-if?ratio=0.9", headers={"HX-Request": "true"}).text
    assert "out of reach" in part
    assert "<html" not in part
    rows = page("GET", f"/ui/profiles/{profile}/figures/allocation-map.json?ratio=0.2").json()["rows"]
    allocated = client.post(f"/profiles/{profile}/allocations", json={"ratio": 0.2}).json()["layers"]
    assert [row["layer"] for row in rows] == [layer["name"] for layer in allocated]
    assert page("POST", f"/ui/profiles/{profile}/delete").headers["Location"] == "/ui/profiles"
    assert page("GET", f"/ui/profiles/{profile}").status_code == 404
