"""The list of jobs and the page of one, without a browser: what they show, and what their forms do."""

import csv
import io
import re
import tarfile
from html import escape, unescape
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest

from app.shared.outcomes import JobError, NewEvent
from app.shared.repositories import outputs, works
from rocket_core.report.schema import CompressionReport
from rocket_core.report.verdict import MeasuredBound, Verdict
from tests.app.api.conftest import BODY
from tests.app.api.routes.test_evaluations import REPORT as EVALUATION
from tests.job_events import add_event
from tests.reference.reports import report_of_layers
from tests.reference.speed import model_speed, speed_report

FILES = {"report.json": b"{}", "rocket/model.safetensors": b"0123"}


@pytest.fixture
def submitted(client):
    return client.post("/jobs", json=BODY | {"metadata": {"label": "<script>alert(1)</script>"}}).json()["id"]


@pytest.fixture
def finished(worker, submitted):
    worker.report = report_of_layers()
    worker.succeed(submitted, FILES)
    return submitted


def test_an_empty_list_shows_the_next_step(page):
    answer = page("GET", "/")
    assert answer.status_code == 200
    assert 'href="/ui/new?model_id=local/tiny"' in answer.text
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "unsafe-inline" not in answer.headers["Content-Security-Policy"].split("script-src")[1].split(";")[0]


def test_text_from_clients_is_escaped(page, submitted):
    for path in ("/", f"/ui/jobs/{submitted}", "/ui/jobs", "/ui/rows"):
        text = page("GET", path).text
        assert "&lt;script&gt;alert(1)" in text
        assert "<script>alert" not in text


def test_a_running_job_shows_its_progress(page, worker, submitted):
    lease = worker.claim(submitted)
    worker.do(outputs.report_progress, lease, stage="calibrating", progress=0.25)
    text = page("GET", f"/ui/jobs/{submitted}").text
    assert 'value="0.25"' in text
    assert re.search(r'<li class="current" aria-current="step"><span class="name">profiling', text)
    assert re.search(r'<li class="pending"><span class="name">writing the files', text)
    live = page("GET", f"/ui/jobs/{submitted}/live?shown=running", headers={"HX-Request": "true"})
    assert "HX-Refresh" not in live.headers
    worker.do(outputs.succeed_without_files, lease)
    live = page("GET", f"/ui/jobs/{submitted}/live?shown=running", headers={"HX-Request": "true"})
    assert live.headers["HX-Refresh"] == "true"


def test_stages_are_shown_for_any_number_of_layers(page, worker, submitted, context):
    lease = worker.claim(submitted)
    worker.do(outputs.report_progress, lease, stage="calibrating", progress=0.1)
    with context.database.transaction() as session:
        for number in range(1100):
            add_event(session, lease, NewEvent(type="layer", message=f"profiled {number}"))
    worker.do(outputs.report_progress, lease, stage="factorizing", progress=0.8)
    worker.do(outputs.report_progress, lease, stage="exporting", progress=0.9)
    text = page("GET", f"/ui/jobs/{submitted}/live").text
    assert re.search(r'<li class="done"><span class="name">compressing the layers', text)
    assert re.search(r'aria-current="step"><span class="name">writing the files', text)


@pytest.mark.parametrize(
    ("outcome", "reasons"), [("accepted", ()), ("regressed", ("KL divergence 1 nats",)), ("anomalous", ("<b>odd",))]
)
def test_a_verdict_is_on_the_page_and_in_the_list(page, worker, submitted, outcome, reasons):
    bound = MeasuredBound(name="max_kl", bound=2, measured=1)
    verdict = Verdict(outcome=outcome, bounds=(bound,), reasons=reasons)
    worker.report = report_of_layers().model_copy(update={"verdict": verdict})
    worker.result = worker.result.model_copy(update={"verdict": verdict, "quality": "1 → 2"})
    worker.succeed(submitted, FILES)
    text = page("GET", f"/ui/jobs/{submitted}").text
    classes, shown = re.search(r'<div class="([^"]+)" role="note"><p><strong>Verdict: (\w+)<', text).groups()
    assert (classes, shown) == ("notice" if outcome == "accepted" else "notice bad", outcome)
    assert f"<p>{escape((reasons or (bound.text,))[0])}</p>" in text
    assert re.search(rf'class="{"good" if outcome == "accepted" else "bad"}">{outcome}</span>', page("GET", "/").text)


def test_a_waiting_job_says_how_many_are_before_it(page, client, worker, submitted):
    first, second = (client.post("/jobs", json=BODY).json()["id"] for _ in range(2))
    assert "2 jobs before yours" in page("GET", f"/ui/jobs/{second}").text
    assert "1 job before yours" in page("GET", f"/ui/jobs/{first}/live").text
    worker.claim(submitted)
    assert "1 job before yours" in page("GET", f"/ui/jobs/{second}/live").text
    assert "before yours" not in page("GET", f"/ui/jobs/{first}/live").text
    assert "before yours" not in page("GET", f"/ui/jobs/{submitted}/live").text


def test_the_map_fills_as_layers_are_profiled_and_chosen(page, worker, submitted):
    address = f"/ui/jobs/{submitted}/map"
    assert f'hx-get="{address}"' in page("GET", f"/ui/jobs/{submitted}").text
    assert "<figure" not in page("GET", address).text
    lease = worker.claim(submitted)
    worker.profile_layers(lease)
    profiled = page("GET", address).text
    assert f'hx-get="{address}?shown=2-0-0"' in profiled
    assert re.findall(r"<td>(?:profiled|factored)</td>", profiled) == ["<td>profiled</td>"] * 2
    assert page("GET", f"{address}?shown=2-0-0").status_code == 204
    worker.do(outputs.save_allocation, lease, [("b", worker.factored)])
    chosen = page("GET", f"{address}?shown=2-0-0").text
    assert f'hx-get="{address}?shown=2-1-0"' in chosen
    assert re.findall(r"<td>(?:profiled|factored)</td>", chosen) == ["<td>factored</td>", "<td>profiled</td>"]
    assert "thick border" not in chosen
    for stage, layer, marked in (("factorizing", "b", 0), ("factorizing", "a", 1), ("exporting", None, 2)):
        worker.do(outputs.report_progress, lease, stage=stage, progress=0.9, layer=layer)
        compressed = page("GET", address).text
        assert f"shown=2-1-{marked}" in compressed
        assert compressed.count('"compressed": true') + compressed.count('"compressed":true') == marked
        assert ("thick border" in compressed) == (marked > 0)
    worker.do(outputs.succeed_without_files, lease)
    assert "hx-get" not in page("GET", f"{address}?shown=2-1-0").text


def test_the_log_resumes_where_it_stopped(page, worker, submitted):
    first = page("GET", f"/ui/jobs/{submitted}/log").text
    assert "queued" in first
    assert "/log?after=1" in first
    worker.fail(submitted, JobError(code="x", message="broken <b>"))
    later = page("GET", f"/ui/jobs/{submitted}/log?after=1").text
    assert "queued" not in later
    assert "broken &lt;b&gt;" in later
    assert "hx-get" not in later


def test_a_finished_job_shows_results_files_and_figures(page, finished):
    text = page("GET", f"/ui/jobs/{finished}").text
    for expected in ("4 bytes", "rocket/model.safetensors", "from_pretrained", "Allocation map", "sha256"):
        assert expected in text, expected
    assert text.count("<figure data-figure=") == 4
    assert 'hx-get="/ui/jobs/' + finished + "/live" not in text


def test_an_export_is_downloaded_as_one_archive(page, client, worker, submitted):
    worker.report = report_of_layers()
    worker.succeed(submitted, {"rocket/a": b"x" * 1000, "rocket/b": b"y", "report.json": b"{}"})
    address = f"/ui/jobs/{submitted}/download/rocket.tar"
    assert f'href="{address}"' in page("GET", f"/ui/jobs/{submitted}").text
    answer = page("GET", address)
    assert answer.headers["Content-Disposition"] == 'attachment; filename="tiny-rocket.tar"'
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert {member.name: member.size for member in archive} == {"tiny/rocket/a": 1000, "tiny/rocket/b": 1}
    # An interrupted download continues, unless the archive has changed.
    part = page("GET", address, headers={"Range": "bytes=700-", "If-Range": answer.headers["ETag"]})
    assert (part.status_code, part.content) == (206, answer.content[700:])
    assert page("GET", address, headers={"Range": "bytes=700-", "If-Range": '"other"'}).status_code == 200
    earlier_name = f"/ui/jobs/{submitted}/download/factored.tar"
    assert page("GET", earlier_name).content == answer.content
    assert page("GET", f"/ui/jobs/{submitted}/download/dense.tar").status_code == 404


def test_deleting_asks_first_even_without_scripts(page, finished):
    text = page("GET", f"/ui/jobs/{finished}").text
    question = text.index('<summary class="button danger">Delete this job</summary>')
    assert question < text.index(f'action="/ui/jobs/{finished}/delete"') < text.index("Yes, delete")


def test_the_start_shows_the_newest_jobs_and_the_way_to_all(page, client):
    ids = [client.post("/jobs", json=BODY).json()["id"] for _ in range(6)]
    start, every = page("GET", "/").text, page("GET", "/ui/jobs").text
    assert [job for job in ids if f'id="row-{job}"' in start] == ids[1:]
    assert 'href="/ui/jobs">All jobs</a>' in start
    assert [job for job in ids if f'id="row-{job}"' in every] == ids
    for path, expected in (("/ui/recent", ids[1:]), ("/ui/rows", ids)):
        rows = page("GET", path).text
        assert "<html" not in rows
        assert [job for job in ids if f'id="row-{job}"' in rows] == expected


def test_rows_of_jobs_can_be_told_apart(page, worker, submitted, finished):
    text = page("GET", "/").text
    for expected in (f"…{finished[-6:]}", "fast", "<strong>", "10 → 10.2", "predicted"):
        assert expected in text, expected


def test_the_sample_model_is_offered_where_it_is(page, settings):
    assert "Try it" not in page("GET", "/").text
    (settings.models_folder / "tiny-llama").symlink_to(settings.models_folder / "tiny")
    [asked] = re.findall(r'href="/ui/new\?(model_id=local/tiny-llama[^"]*)"', page("GET", "/").text)[:1]
    assert {"evaluate": ["yes"], "benchmark": ["yes"]}.items() <= parse_qs(unescape(asked)).items()


@pytest.mark.parametrize("address", ["/ui", "/ui/"])
def test_the_folder_of_the_pages_leads_to_the_first(client, address):
    answer = client.get(address, headers={"Accept": "text/html"})
    assert (answer.status_code, answer.url.path) == (200, "/")
    assert "Rocket makes transformer models smaller" in answer.text


def test_a_measured_speed_is_shown(page, worker, submitted):
    worker.report = report_of_layers().model_copy(update={"speed": speed_report(model_speed("rocket"))})
    worker.succeed(submitted, FILES)

    text = page("GET", f"/ui/jobs/{submitted}").text

    assert "Speed before and after" in text
    assert "medians of 5 rounds" in text


@pytest.mark.parametrize("name", ["allocation-map", "errors-by-size", "predicted-and-achieved", "stage-times"])
def test_every_figure_is_available_as_data(page, finished, name):
    table = page("GET", f"/ui/jobs/{finished}/figures/{name}.json").json()
    rows = list(csv.DictReader(io.StringIO(page("GET", f"/ui/jobs/{finished}/figures/{name}.csv").text)))
    assert len(rows) == len(table["rows"]) > 0
    assert list(rows[0]) == [column["name"] for column in table["columns"]]
    for path in (f"{name}.xml", "nothing.json", name):
        assert page("GET", f"/ui/jobs/{finished}/figures/{path}").status_code == 404


def test_buttons_cancel_retry_and_delete(page, client, submitted):
    answer = page("POST", f"/ui/jobs/{submitted}/cancel", data={"from": "list"})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/jobs")
    assert client.get(f"/jobs/{submitted}").json()["status"] == "cancelled"
    again = page("POST", f"/ui/jobs/{submitted}/retry")
    new = again.headers["Location"].rsplit("/", 1)[-1]
    assert client.get(f"/jobs/{new}").json()["retry_of"] == submitted
    assert page("POST", f"/ui/jobs/{submitted}/delete").headers["Location"] == "/ui/jobs"
    assert client.get(f"/jobs/{submitted}").status_code == 404
    # A second press on the same page.
    answer = page("POST", f"/ui/jobs/{submitted}/delete")
    assert answer.status_code == 404
    assert answer.headers["Content-Type"].startswith("text/html")


def test_a_job_of_one_format_shows_its_bits(page, client):
    body = {"model_id": BODY["model_id"], "options": {"method": "gptq", "code_bits": 3}}
    job = client.post("/jobs", json=body).json()
    for path in ("/", f"/ui/jobs/{job['id']}"):
        assert "gptq, 3 bits" in page("GET", path).text


@pytest.mark.parametrize("path", ["/", "/ui/jobs", "/ui/rows", "/ui/jobs/{}"])
@pytest.mark.parametrize("code", ["infeasible_budget", "worker_lost"])
def test_a_failure_that_would_recur_leads_to_other_settings(path, code, page, worker, client):
    job = client.post("/jobs", json=BODY | {"ratio": None, "bits": 5}).json()["id"]
    worker.fail(job, JobError(code=code, message="5 bits <are> out of reach: ask for 6 or more"))
    text = page("GET", path.format(job)).text
    link = re.search(r'href="(/ui/new\?[^"]+)">Change settings', text)
    recurs = code == "infeasible_budget"
    assert (link is not None) is recurs
    assert (f'action="/ui/jobs/{job}/retry"' in text) is not recurs
    if link is not None:
        assert "5 bits &lt;are&gt; out of reach: ask for 6 or more" in text
        assert dict(parse_qsl(urlsplit(unescape(link[1])).query))["bits"] == "5.0"


def test_a_job_for_bits_shows_them(page, client):
    job = client.post("/jobs", json=BODY | {"ratio": None, "bits": 4}).json()
    for path in ("/", f"/ui/jobs/{job['id']}"):
        assert "at most 4 bits per weight" in page("GET", path).text


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ({"ratio": 0.05}, {"target": "ratio", "ratio": "0.05"}),
        ({"ratio": 0.45}, {"target": "ratio", "ratio": "0.45"}),
        ({"ratio": None, "target_bytes": 120_000}, {"target": "size", "size": "120000"}),
        ({"ratio": None, "bits": 4.5}, {"target": "bits", "bits": "4.5"}),
    ],
)
def test_a_new_job_with_these_settings_has_the_same_target(page, client, target, fields):
    job = client.post("/jobs", json=BODY | target).json()["id"]
    link = re.search(r'href="(/ui/new\?[^"]+)">New job with these settings', page("GET", f"/ui/jobs/{job}").text)
    asked = dict(parse_qsl(urlsplit(unescape(link[1])).query))
    assert {name: asked.get(name) for name in fields} == fields


def test_a_result_is_improved_with_the_next_preset_and_compared(page, client, worker, finished):
    link = re.search(r'href="(/ui/new\?[^"]+)">Improve it with preset best', page("GET", f"/ui/jobs/{finished}").text)
    form = page("GET", unescape(link[1])).text
    assert '<option value="best" selected>' in form
    assert f'<input type="hidden" name="improves" value="{finished}">' in form
    made = page("POST", "/ui/new", data=dict(parse_qsl(urlsplit(unescape(link[1])).query))).headers["Location"]
    better = client.get(made.removeprefix("/ui")).json()
    assert (better["options"]["preset"], better["ratio"]) == ("best", BODY["ratio"])
    worker.succeed(better["id"], FILES)
    text = page("GET", made).text
    compared = re.search(r'href="(/ui/compare\?[^"]+)">Compare with the job that it improves', text)[1]
    assert {finished, better["id"]} <= set(re.findall(r"job_\w+", page("GET", unescape(compared)).text))


@pytest.mark.parametrize("options", [{"method": "svd-llm"}, {"preset": "max"}])
def test_no_better_preset_is_offered_where_there_is_none(page, client, worker, options):
    job = client.post("/jobs", json=BODY | {"options": options}).json()["id"]
    assert "Improve it" not in page("GET", f"/ui/jobs/{job}").text
    worker.succeed(job, FILES)
    assert "Improve it" not in page("GET", f"/ui/jobs/{job}").text


def test_errors_are_pages_for_browsers_and_json_for_programs(page, client):
    missing = "/ui/jobs/job_" + "0" * 26
    answer = page("GET", missing)
    assert (answer.status_code, answer.headers["Content-Type"]) == (404, "text/html; charset=utf-8")
    assert "no job has this id" in answer.text
    assert client.get(missing).headers["Content-Type"] == "application/problem+json"
    assert page("GET", "/ui/jobs?after=x").status_code == 422


def test_the_report_is_html_for_browsers_and_json_otherwise(page, client, finished):
    path = f"/jobs/{finished}/report"
    html = page("GET", path)
    assert html.headers["Content-Type"].startswith("text/html")
    assert "sandbox" in html.headers["Content-Security-Policy"]
    assert "Allocation map" in html.text
    for accept in ("*/*", "application/json", "text/html;q=0.1, application/json", "text/plain", "nonsense;q=x"):
        answer = client.get(path, headers={"Accept": accept})
        assert CompressionReport.model_validate(answer.json()).layers, accept
        assert answer.headers["Vary"] == "Accept"


def test_jobs_can_be_compared(page, client, worker, finished):
    other = client.post("/jobs", json=BODY | {"ratio": 0.5}).json()["id"]
    worker.succeed(other, FILES)
    text = page("GET", "/ui/compare").text
    assert text.count('type="checkbox"') == 2
    query = f"job={finished}&job={other}"
    text = page("GET", f"/ui/compare?{query}").text
    assert 'data-figure="allocation-difference"' in text
    rows = page("GET", f"/ui/compare/figures/allocation-difference.json?{query}").json()["rows"]
    assert len(rows) == 2 * len(report_of_layers().layers)
    assert page("GET", "/ui/compare?job=x").status_code == 404
    assert page("GET", "/ui/compare?" + "job=x&" * 7).status_code == 422


def test_a_comparison_shows_what_was_measured_when_it_was(page, client, worker, finished):
    other = client.post("/jobs", json=BODY | {"ratio": 0.5}).json()["id"]
    fast = {"generation_rate": 75, "generation_ratio": 1.5, "prompt_rate": 2469, "prompt_ratio": 2}
    export = model_speed("rocket", weights_bytes=2_000_000, memory_bytes=9_000_000, **fast)
    worker.report = report_of_layers().model_copy(update={"speed": speed_report(export)})
    worker.succeed(other, FILES)

    def rows():
        text = page("GET", f"/ui/compare?job={finished}&job={other}").text
        found = re.findall(r'<tr><th scope="row">(.+?)</th><td>(.*?)</td><td>(.*?)</td></tr>', text)
        return {name: unescaped(values) for name, *values in found}

    def unescaped(values):
        return tuple(map(unescape, values))

    shown = rows()
    assert shown["memory of the loaded weights"] == ("not measured", "2.00 MB")
    assert shown["memory of the process"] == ("not measured", "10.00 MB → 9.00 MB")
    assert shown["tokens generated per second"] == ("not measured", "50 → 75 (1.50x)")
    assert shown["tokens of the prompt read per second"] == ("not measured", "1,234 → 2,469 (2.00x)")
    assert "perplexity" not in shown
    lease = worker.claim(client.post(f"/jobs/{finished}/evaluations", json={}).json()["id"])
    worker.do(works.save_report, lease, EVALUATION)
    worker.do(outputs.succeed_without_files, lease)
    assert rows()["perplexity"] == ("2.7 → 7.4", "not measured")


def test_prompts_are_answered_by_both_models_later(page, client, worker, finished):
    address = f"/ui/jobs/{finished}"
    assert f'action="{address}/evaluations"' in page("GET", address).text
    asked = {"prompts": "Hi\n\n  there\n", "answer_tokens": "3", "dataset": "builtin"}
    answer = page("POST", f"{address}/evaluations", data=asked)
    assert answer.status_code == 303
    evaluating = answer.headers["Location"]
    job = client.get(evaluating.removeprefix("/ui")).json()
    assert (job["evaluate"]["prompts"], job["evaluate"]["answer_tokens"]) == (["Hi", "there"], 3)
    assert "queued" in page("GET", address).text.split("before-and-after")[1].split("<form")[0]

    lease = worker.claim(job["id"])
    worker.do(works.save_report, lease, EVALUATION)
    worker.do(outputs.succeed_without_files, lease)
    for place in (address, evaluating):
        text = page("GET", place).text
        assert '<mark class="parting" title="probability 0.500 → 0.400, KL divergence 0.2000 nats"> you</mark>' in text
        assert '<mark class="parting"> me</mark>' in text
        assert "perplexity" in text
    assert f'href="{address}"' in page("GET", evaluating).text
    assert re.search(r'<li class="done"><span class="name">', page("GET", evaluating).text) is None
    row = page("GET", "/ui/jobs").text.split(f'id="row-{job["id"]}"')[1].split("</tr>")[0]
    assert "evaluation" in row
    assert f'href="{address}"' in row


def test_a_quality_measured_later_replaces_the_prediction(page, client, worker, finished):
    def shown():
        row = page("GET", "/ui/jobs").text.split(f'id="row-{finished}"')[1].split("</tr>")[0]
        headline = page("GET", f"/ui/jobs/{finished}").text.split("<dt>Quality</dt>")[1].split("</div>")[0]
        return row.split('data-title="quality"')[1].split("</td>")[0], headline

    assert all("predicted" in text for text in shown())
    job = client.post(f"/jobs/{finished}/evaluations", json={}).json()
    lease = worker.claim(job["id"])
    worker.do(works.save_report, lease, EVALUATION)
    worker.do(outputs.succeed_without_files, lease)
    value = f"{EVALUATION.before.perplexity:g} → {EVALUATION.after.perplexity:g}"
    row, headline = shown()
    assert "measured" in row
    for text in (row, headline):
        assert value in unescape(text)
        assert "predicted" not in text


def test_a_form_for_prompts_says_what_is_wrong(page, finished):
    answer = page("POST", f"/ui/jobs/{finished}/evaluations", data={"prompts": "x\n" * 17})
    assert answer.status_code == 422
    assert "at most 16 items" in answer.text
