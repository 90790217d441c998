"""What a link shows to people without a key, what it hides, and the forms that create and end it."""

import re
from datetime import timedelta

import pytest

from app.main import create_app
from app.shared.repositories import keys, outputs, sweeps, works
from tests.app.api.conftest import BODY
from tests.app.api.routes.test_evaluations import REPORT
from tests.app.conftest import local_client
from tests.reference.reports import report_of_layers

FILES = {"rocket/model.safetensors": b"weights", "rocket/config.json": b"{}", "report.json": b"{}"}
HIDDEN = "only-alice-knows"
KEPT_APART = {"Referrer-Policy": "no-referrer", "X-Robots-Tag": "noindex", "Cache-Control": "no-store"}


@pytest.fixture
def finished(client, worker):
    worker.report = report_of_layers()
    job_id = client.post("/jobs", json=BODY | {"metadata": {"about": HIDDEN}}).json()["id"]
    worker.succeed(job_id, FILES)
    return job_id


@pytest.fixture
def share(client, context, finished):
    """Return a function that creates a link, after which only its visitors need no key."""

    def share(**settings):
        made = client.post(f"/jobs/{finished}/link", json=settings).json()
        with context.database.transaction() as session:
            keys.create_key(session, "local", label=HIDDEN)
        return made["url"].removeprefix("http://localhost")

    return share


def keeps_apart(answer):
    return {name: answer.headers.get(name) for name in KEPT_APART} == KEPT_APART


def stripped(answer):
    """Return a page without the id of its request, which differs each time."""
    return re.sub(r", request <code>\w+</code>", "", answer.text)


def test_the_page_shows_the_report_without_a_key(page, share):
    address = share()
    assert page("GET", "/ui/jobs").headers["Location"].startswith("/ui/sign-in")
    shown = page("GET", address)
    assert (shown.status_code, keeps_apart(shown)) == (200, True)
    assert "local/tiny" in shown.text
    assert 'class="headlines"' in shown.text
    assert 'data-figure="' in shown.text
    report = page("GET", f"{address}/report")
    assert (report.status_code, keeps_apart(report)) == (200, True)
    assert "sandbox" in report.headers["Content-Security-Policy"]
    assert page("GET", re.search(r'href="(/ui/static/pages.css[^"]*)"', shown.text)[1]).status_code == 200


def test_nothing_else_of_the_tenant_is_shown(page, client, finished, share):
    other = client.post("/jobs", json=BODY).json()["id"]
    hook = client.post("/webhooks", json={"url": f"https://{HIDDEN}.example/"}).json()["id"]
    address = share(with_files=True)
    for path in (address, f"{address}/report"):
        text = page("GET", path).text
        for secret in (HIDDEN, other, hook, finished, "hooks", "csrf", "/ui/jobs", "/ui/compare", "/ui/keys"):
            assert secret not in text, (path, secret)
    # No link leads to what needs a key, except the documentation of the API at the bottom.
    links = set(re.findall(r'(?:href|src|action)="([^"#]+)', page("GET", address).text))
    assert {link for link in links if not link.startswith(("/ui/static/", address))} <= {"/", "/docs", "/openapi.json"}


def test_only_the_jobs_own_measurements_are_shown(page, client, worker):
    own = report_of_layers().model_copy(update={"evaluation": REPORT})
    for report, is_shown in ((own, True), (report_of_layers(), False)):
        worker.report = report
        job_id = client.post("/jobs", json=BODY).json()["id"]
        worker.succeed(job_id, FILES)
        later = worker.claim(client.post(f"/jobs/{job_id}/evaluations", json={}).json()["id"])
        worker.do(works.save_report, later, REPORT)
        worker.do(outputs.succeed_without_files, later)
        address = client.post(f"/jobs/{job_id}/link", json={}).json()["url"].removeprefix("http://localhost")
        for path in (address, f"{address}/report"):
            text = page("GET", path).text
            assert ("KL divergence, nats per token" in text) is is_shown, path
        assert ('<span class="quiet small">Prompt</span> Hi' in page("GET", address).text) is is_shown


def test_files_are_given_only_if_the_owner_says_so(page, share):
    paths = ("files/rocket/model.safetensors", "download/rocket.tar")
    address = share()
    assert "safetensors" not in re.sub(r"<script.*?</script>", "", page("GET", address).text, flags=re.DOTALL)
    for path in paths:
        refused = page("GET", f"{address}/{path}")
        assert (refused.status_code, keeps_apart(refused)) == (404, True)


def test_files_of_a_link_with_files_are_those_of_the_job(page, share):
    address = share(with_files=True)
    shown = page("GET", address).text
    for name, content in FILES.items():
        path = f"{address}/files/{name}"
        assert f'href="{path}"' in shown
        answer = page("GET", path)
        assert (answer.content, keeps_apart(answer)) == (content, True)
        assert page("HEAD", path).headers["Content-Length"] == str(len(content))
    assert page("GET", f"{address}/files/rocket/config.json", headers={"Range": "bytes=1-"}).content == b"}"
    archive = page("GET", re.search(rf'href="({address}/download/[^"]+)"', shown)[1])
    assert (archive.status_code, b"weights" in archive.content, keeps_apart(archive)) == (200, True, True)
    assert page("GET", f"{address}/files/none").status_code == 404


def test_wrong_and_ended_links_are_alike(page, client, context, finished, share):
    address = share(with_files=True)
    wrong = [address[:-1] + ("0" if address[-1] != "0" else "1"), "/ui/shared/x", "/ui/shared/" + "é" * 90]
    other_id = address.replace("rl_", "rl_0")[: len(address)]
    wrong += [other_id, f"{wrong[0]}/report", f"{wrong[0]}/files/report.json", f"{wrong[0]}/download/-1.tar"]
    answers = [page("GET", path) for path in wrong]
    with context.database.transaction() as session:
        key = keys.create_key(session, "local").text
    assert client.delete(f"/jobs/{finished}/link", headers={"Authorization": f"Bearer {key}"}).status_code == 204
    answers += [page("GET", address), page("GET", f"{address}/report"), page("GET", f"{address}/files/report.json")]
    assert {answer.status_code for answer in answers} == {404}
    assert len({stripped(answer) for answer in answers}) == 1
    assert all(map(keeps_apart, answers))
    assert "ask whoever sent it" in answers[0].text
    assert "/ui/jobs" not in answers[0].text
    # A program gets a problem document.
    problem = client.get(address, headers={"Accept": "*/*"})
    assert (problem.json()["code"], keeps_apart(problem)) == ("link_not_found", True)


def test_a_visitor_can_do_nothing(client, share):
    address = share(with_files=True)
    for method in ("POST", "PUT", "DELETE"):
        for path in (address, f"{address}/report", f"{address}/files/report.json"):
            assert client.request(method, path).status_code == 401


def test_the_limit_for_requests_without_a_key_applies(settings, share):
    address = share()
    with local_client(create_app(settings.model_copy(update={"rate_limit": "3/hour"}))) as client:
        assert [client.get(address).status_code for _ in range(4)] == [200, 200, 200, 429]


def test_expired_files_are_not_offered(page, client, context, worker):
    worker.report = report_of_layers()
    job_id = client.post("/jobs", json=BODY).json()["id"]
    worker.succeed(job_id, FILES, retention=timedelta(0))
    address = (
        client.post(f"/jobs/{job_id}/link", json={"with_files": True}).json()["url"].removeprefix("http://localhost")
    )
    for key in worker.do(sweeps.expire_artifacts):
        context.artifacts.remove(key)
    shown = page("GET", address)
    assert "at the end of their retention period" in shown.text
    assert "/files/" not in shown.text
    assert page("GET", f"{address}/files/report.json").status_code == 410


def test_a_job_page_creates_and_ends_the_link(page, client, finished):
    path = f"/ui/jobs/{finished}/link"
    assert "Create a link" in page("GET", f"/ui/jobs/{finished}").text
    made = page("POST", path, data={"with_files": "yes"})
    url = re.search(r"http://localhost(/ui/shared/rl_\w+)", made.text)[1]
    assert page("GET", url).status_code == 200
    later = page("GET", f"/ui/jobs/{finished}").text
    assert url not in later
    assert "downloads its files" in later
    ended = page("POST", f"{path}/end")
    assert (ended.status_code, ended.headers["Location"]) == (303, f"/ui/jobs/{finished}#link")
    assert page("GET", url).status_code == 404
    page("POST", path)
    assert client.get(f"/jobs/{finished}/link").json()["with_files"] is False


def test_forms_need_the_token_of_the_session(page, client, context, finished):
    with context.database.transaction() as session:
        key = keys.create_key(session, "local").text
    assert client.post("/ui/sign-in", data={"key": key}, follow_redirects=False).status_code == 303
    text = page("GET", f"/ui/jobs/{finished}").text
    path, token = f"/ui/jobs/{finished}/link", re.search(r'name="csrf" value="([^"]+)"', text)[1]
    assert page("POST", path).status_code == 403
    assert page("POST", path, data={"csrf": token}).status_code == 200
    assert page("POST", f"{path}/end").status_code == 403
    assert page("POST", f"{path}/end", data={"csrf": token}).status_code == 303


def test_a_job_without_a_result_offers_no_link(page, client):
    job_id = client.post("/jobs", json=BODY).json()["id"]
    assert "/link" not in page("GET", f"/ui/jobs/{job_id}").text
    assert page("POST", f"/ui/jobs/{job_id}/link").status_code == 409
