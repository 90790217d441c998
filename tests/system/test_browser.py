"""The pages in a real browser: from an empty page to a downloaded model that loads, at every width and in both schemes.

Screenshots of every screen are left in `build/screenshots`.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright
from transformers import AutoModelForCausalLM

from tests.e2e.service_process import ROCKET, Service
from tests.reference.tiny_models import save_tiny_model
from tests.reference.upload_hub import TOKEN, UploadHub
from tests.worker.test_webhooks import Receiver

pytestmark = pytest.mark.system

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")
PATIENCE = 120_000


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium")
    assert program, "this test needs a browser: apt-get install chromium"
    # Its sandbox refuses to work for root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=options)
        yield started
        started.close()


@pytest.fixture(scope="module")
def hub():
    with UploadHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def service(tmp_path_factory, hub):
    """Yield a service with one model, small enough to be compressed during a test."""
    data = tmp_path_factory.mktemp("pages") / "data"
    save_tiny_model("llama", data / "models" / "tiny")
    # The tests receive webhooks on the loopback.
    settings = {"ROCKET_MEASURE_ENERGY": "true", "ROCKET_WEBHOOKS_ALLOW_PRIVATE": "true"}
    # In place of the Hub, without the store that only the real one has.
    running = Service(data, HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", **settings)
    yield running
    running.close()


@contextmanager
def open_page(browser, service, *, width=1440, scheme="light", **options):
    """Yield a page, which must not log errors."""
    complaints = []
    context = browser.new_context(
        base_url=service.url, viewport={"width": width, "height": 900}, color_scheme=scheme, **options
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    # The browser itself logs error statuses.
    page.on("console", lambda told: complaints.append(told.text) if _is_complaint(told) else None)
    yield page
    context.close()
    assert complaints == []


def _is_complaint(told):
    # Leaving a page aborts its requests, and htmx logs each.
    aborted = told.text.startswith(("htmx:afterRequest", "htmx:sendError", "htmx:sendAbort"))
    return told.type == "error" and "status of 4" not in told.text and not aborted


def look_at(page, name):
    """Save a screenshot of a page at this width and in this scheme, and assert that it has no serious violations."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    size, scheme = page.viewport_size["width"], page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    page.wait_for_timeout(300)
    page.screenshot(path=SCREENSHOTS / f"{name}-{size}-{'dark' if scheme else 'light'}.png", full_page=True)
    # Only elements that scroll are wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= size, name
    found = Axe().run(page).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in {"serious", "critical"}]
    assert serious == [], name


def fill_in(page, ratio):
    page.get_by_label("Samples").fill("4")
    page.get_by_label("Tokens per sample").fill("32")
    page.get_by_label("Measure quality").check()
    page.get_by_label("ratio, 0 to").fill(str(ratio))


def finish(page):
    """Wait for the end of the job that the page shows."""
    expect(page.get_by_role("heading", name="Download")).to_be_visible(timeout=PATIENCE)
    assert "succeeded" in page.locator(".badge").first.inner_text()


@pytest.fixture(scope="module")
def receiver():
    """Yield a receiver of webhooks."""
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_a_webhook_is_created_and_tried_on_its_page(browser, service, receiver):
    with open_page(browser, service) as page:
        page.goto("/ui/webhooks")
        page.get_by_label("Address").fill(receiver.url)
        page.get_by_role("button", name="Create").click()
        expect(page.locator(".notice[role=status]")).to_contain_text("whsec_")
        page.get_by_role("button", name="Send a test message").click()
        expect(page.locator("td", has_text="accepted")).to_be_visible()
        look_at(page, "webhooks-tried")
    assert [json.loads(body)["type"] for _, _, body in receiver.received] == ["webhook.test"]


def test_a_job_made_on_an_empty_page_gives_a_loadable_model(browser, service, tmp_path, receiver):
    with open_page(browser, service) as page:
        page.goto("/")
        look_at(page, "empty")
        page.get_by_role("link", name="Compress local/tiny").click()
        expect(page.locator("#preview")).to_contain_text("parameters")
        fill_in(page, 0.3)
        look_at(page, "new-job")
        page.get_by_role("button", name="Compress", exact=True).click()
        expect(page.locator(".stages")).to_contain_text("profiling")
        # The first job waits until the worker has imported the library.
        expect(page.locator(".log")).to_contain_text("running", timeout=PATIENCE)
        look_at(page, "running")
        finish(page)
        # The page has reloaded itself, and shows the result.
        expect(page.locator("figure[data-figure='allocation-map'] svg").first).to_be_visible()
        page.get_by_text("Time and energy, next to training").click()
        expect(page.locator("tr", has_text="this one, of tiny")).to_contain_text("Wh")
        expect(page.locator(".headline", has_text="Quality")).to_contain_text("→")
        with page.expect_download() as download:
            page.get_by_role("link", name="Download rocket").click()
        download.value.save_as(tmp_path / "archive.tar")
        with tarfile.open(tmp_path / "archive.tar") as archive:
            archive.extractall(tmp_path, filter="data")
        folder = tmp_path / "tiny" / "rocket"
        snippet = page.locator("pre code").first.inner_text().replace("tiny/rocket", str(folder))
        # Formats that cannot hold the result are not offered.
        expect(page.get_by_role("button", name=re.compile("^Make "))).to_have_count(1)
        page.get_by_role("button", name="Make dense").click()
        stock = page.get_by_role("link", name="Download dense")
        expect(stock).to_be_visible(timeout=PATIENCE)
        look_at(page, "exported")
        with page.expect_download() as download:
            stock.click()
        download.value.save_as(tmp_path / "stock.tar")
        with tarfile.open(tmp_path / "stock.tar") as archive:
            archive.extractall(tmp_path, filter="data")
        page.get_by_role("link", name="Files, and how to run it").click()
        expect(page.get_by_role("heading", name="Download")).to_be_visible()
    assert "import rocket_core.hf" in snippet
    names: dict[str, object] = {}
    exec(snippet, names)  # noqa: S102 - what the page tells people to type
    model, tokenizer = names["model"], names["tokenizer"]
    hello = tokenizer("hello", return_tensors="pt")
    predicted = model(**hello).logits
    assert predicted.isfinite().all()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny" / "dense", dtype=model.dtype)
    assert torch.allclose(exported(**hello).logits, predicted, atol=0.05)
    ended = [json.loads(body) for _, _, body in receiver.received[1:]]
    assert [(each["type"], each["data"]["model_id"]) for each in ended] == [("job.succeeded", "local/tiny")] * 2


def test_a_result_is_pushed_to_the_hub_from_its_page(browser, service, hub):
    jobs = service.client.get("/jobs").json()["data"]
    done = next(job["id"] for job in jobs if job["status"] == "succeeded" and job["kind"] == "compression")
    files = service.client.get(f"/jobs/{done}/artifacts").json()["data"]
    with open_page(browser, service) as page:
        for repository, outcome in (("bob/small", "failed"), ("alice/small", "succeeded")):
            page.goto(f"/ui/jobs/{done}")
            page.get_by_text("Choose a repository").click()
            page.get_by_label("Repository on the Hugging Face Hub").fill(repository)
            page.get_by_label("Private").check()
            page.get_by_label("Hub token with write access").fill(TOKEN)
            page.get_by_role("button", name="Push to Hub").click()
            newest = page.locator("#pushes li").first
            expect(newest).to_have_attribute("data-status", outcome, timeout=PATIENCE)
            look_at(page, f"push-{outcome}")
            expect(newest.get_by_text("may not write to bob/small")).to_have_count(int(outcome == "failed"))
        assert newest.get_by_role("link", name="alice/small").get_attribute("href") == f"{hub.url}/alice/small"
        assert TOKEN not in page.content()
        newest.locator(".badge").click()
        expect(page.get_by_text("Pushes the rocket export of an earlier job")).to_be_visible()
        look_at(page, "push")
    pushed = [file["name"].removeprefix("rocket/") for file in files if file["name"].startswith("rocket/")]
    assert sorted(hub.files("alice/small")) == sorted(pushed)
    assert hub.private == {"alice/small"}


def test_a_model_is_fitted_into_a_size(browser, service):
    with open_page(browser, service) as page:
        page.goto("/ui/new?model_id=local/tiny&samples=4&sequence_length=32")
        expect(page.get_by_label("Fit into a size")).to_be_checked()
        expect(page.locator("#preview")).to_contain_text("enter the size")
        page.get_by_label("size", exact=True).fill("150kB")
        page.get_by_label("Samples").focus()
        expect(page.locator("#preview")).to_contain_text("≤ 150")
        page.get_by_role("button", name="Compress", exact=True).click()
        finish(page)
        expect(page.locator(".headline").first).to_contain_text("bits per weight")
        expect(page.locator("figure[data-figure='allocation-map']").first).to_contain_text("bits on disk per weight")


def test_a_target_is_selected_by_entering_it(browser, service):
    with open_page(browser, service) as page:
        page.goto("/ui/new?model_id=local/tiny&samples=4&sequence_length=32")
        expect(page.locator("#preview")).to_contain_text("enter the size that it is to fit into, or bits per weight")
        page.get_by_label("bits per weight, above 0").fill("8")
        expect(page.get_by_label("Bits per weight of the layers")).to_be_checked()
        page.get_by_label("Samples").focus()
        expect(page.locator("#preview")).not_to_contain_text("enter the size")
        look_at(page, "new-job-for-bits")
        page.get_by_label("size", exact=True).fill("150kB")
        expect(page.get_by_label("Fit into a size")).to_be_checked()
        # Requests in flight when the page is closed would be logged as errors.
        with page.expect_response("**/ui/new/preview"):
            page.get_by_label("Samples").focus()
        with page.expect_response("**/ui/new/preview"):
            page.get_by_label("ratio, 0 to").fill("0.4")
        expect(page.get_by_label("Remove a fraction")).to_be_checked()


def test_another_ratio_can_be_chosen_from_a_profile(browser, service):
    with open_page(browser, service) as page:
        ratio = page.get_by_label("Fraction of the compressible")
        page.goto("/ui/profiles")
        for link in [link.get_attribute("href") for link in page.locator("tbody a[href^='/ui/profiles/']").all()]:
            # Those that count bytes have a size and bits per weight to choose as well.
            page.goto(link)
            if ratio.count():
                break
        before = page.locator("#what-if .value").first.inner_text()
        ratio.fill("0.5")
        expect(page.locator("#what-if .value").first).not_to_have_text(before)
        page.get_by_role("link", name="Compress at 0.5").click()
        expect(page.locator("#preview")).to_contain_text("skips the calibration")
        expect(page.locator("#preview figure[data-figure='size-frontier'] svg").first).to_be_visible()
        fill_in(page, 0.5)
        page.get_by_role("button", name="Compress", exact=True).click()
        finish(page)
        page.goto("/ui/compare")
        for box in page.get_by_role("checkbox").all():
            box.check()
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("figure[data-figure='allocation-difference'] svg").first).to_be_visible()
        expect(page.get_by_role("row", name="perplexity")).to_be_visible()
        expect(page.get_by_role("row", name="energy")).to_contain_text("Wh")


def test_both_models_answer_a_prompt_on_the_page_of_a_job(browser, service):
    jobs = service.client.get("/jobs?status=succeeded").json()["data"]
    done = next(job["id"] for job in jobs if job["kind"] == "compression")
    with open_page(browser, service) as page:
        page.goto(f"/ui/jobs/{done}")
        page.get_by_label("Prompts for both models").fill("hello\nOnce upon a time")
        page.get_by_label("Tokens per answer").fill("8")
        page.get_by_role("button", name="Ask both models").click()
        expect(page.locator(".answer")).to_have_count(2, timeout=PATIENCE)
        # The page has reloaded itself, and says so.
        expect(page.locator(".toast")).to_contain_text("is done")
        page.get_by_role("link", name="an earlier job").click()
        expect(page.locator(".answer .prompt").last).to_contain_text("Once upon a time")
        page.get_by_role("link", name="local/tiny", exact=True).click()
        points = page.locator("figure[data-figure='quality-over-size'] a")
        expect(points.first).to_be_visible()
        page.goto(points.first.get_attribute("href") or points.first.evaluate("link => link.href.baseVal"))
        expect(page.get_by_role("heading", name="Before and after")).to_be_visible()


def test_a_text_and_a_model_are_uploaded_and_used(browser, service, tmp_path):
    (tmp_path / "my notes.txt").write_text("\n".join(f"line {number} of my own text" for number in range(200)))
    folder = save_tiny_model("llama", tmp_path / "own-model")
    (folder / "training.log").write_text("not a part of the model")
    with open_page(browser, service) as page:
        page.goto("/ui/new?samples=4&sequence_length=32&ratio=0.3")
        page.get_by_text("Upload a model from this computer").click()
        page.get_by_label("Drop a folder").set_input_files(folder)
        expect(page.get_by_label("Model", exact=True)).to_have_value("upload/own-model", timeout=PATIENCE)
        expect(page.get_by_label("Drop a folder").locator("..").get_by_role("status")).to_contain_text(
            "upload/own-model"
        )
        # As a browser does when a file is dropped.
        transfer = page.evaluate_handle(
            "text => { const it = new DataTransfer(); it.items.add(new File([text], 'my notes.txt')); return it; }",
            (tmp_path / "my notes.txt").read_text(),
        )
        page.locator("[data-drop=calibration]").dispatch_event("drop", {"dataTransfer": transfer})
        expect(page.locator("#dataset option:checked")).to_have_text("my notes.txt (your upload)")
        expect(page.locator("[data-drop=calibration] [role=status]")).to_contain_text("1 document")
        expect(page.locator("#preview")).to_contain_text("parameters")
        look_at(page, "uploads")
        # The message of the first upload also says that it was sent.
        with page.expect_response("**/check"):
            page.get_by_label("Drop a folder").set_input_files(folder)
        expect(page.locator("[data-drop=model] [role=status]")).to_contain_text("sent")
        page.get_by_label("Your own text").set_input_files(folder / "config.json")
        expect(page.locator("[data-drop=calibration] [role=status]")).to_contain_text("neither .txt nor .jsonl")
        (folder / "model.safetensors").unlink()
        page.get_by_label("Drop a folder").set_input_files(folder)
        expect(page.locator("[data-drop=model] [role=status]")).to_contain_text("safetensors")
        page.get_by_role("button", name="Compress", exact=True).click()
        finish(page)


def test_an_upload_continues_over_plain_http(browser, service, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "interrupted")
    contents = [bytes(place % 251 for place in range(size)) for size in (0, 3, 55, 56, 64, 119, 1000)]
    status = "[data-drop=model] [role=status]"
    with open_page(browser, service) as page:
        # As on a page that was not served over HTTPS or from this machine.
        page.add_init_script("Object.defineProperty(crypto, 'subtle', { value: undefined })")
        page.goto("/ui/new")
        digests = page.evaluate(
            "all => all.map(one => [...new Uint8Array(sha256(Uint8Array.from(one).buffer))])", list(map(list, contents))
        )
        assert list(map(bytes, digests)) == [hashlib.sha256(content).digest() for content in contents]
        page.get_by_text("Upload a model from this computer").click()
        weights, pieces = "**/files/model.safetensors", []

        def lose_the_rest(route):
            pieces.append(route.request.headers["content-range"])
            route.continue_() if len(pieces) == 1 else route.fulfill(status=409, json={"detail": "cut off"})

        page.route(weights, lose_the_rest)
        page.get_by_label("Drop a folder").set_input_files(folder)
        expect(page.locator(status)).to_contain_text("cut off")
        page.unroute(weights)
        page.get_by_label("Drop a folder").set_input_files(folder)
        expect(page.locator(status)).to_contain_text("entered above as upload/interrupted")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_usable_at_every_width(browser, service, width, scheme):
    jobs = service.client.get("/jobs").json()["data"]
    done = [job["id"] for job in jobs if job["status"] == "succeeded" and job["kind"] == "compression"]
    asked = next(job for job in jobs if job["kind"] == "evaluation")
    shared = service.client.post(f"/jobs/{done[0]}/link", json={"with_files": True}).json()["url"]
    screens = {
        "start": "/",
        "jobs": "/ui/jobs",
        "webhooks": "/ui/webhooks",
        "new-job-with-profile": "/ui/new?model_id=local/tiny&samples=4&sequence_length=32&seed=0&ratio=0.4",
        "job": f"/ui/jobs/{done[0]}",
        "shared": urlsplit(shared).path,
        "profiles": "/ui/profiles",
        "evaluation": f"/ui/jobs/{asked['id']}",
        "before-and-after": f"/ui/jobs/{asked['source_job_id']}",
        "model": "/ui/model?id=local/tiny",
        "profile": f"/ui/profiles/{next(job['profile_id'] for job in jobs if job['profile_id'])}",
        "compare": "/ui/compare?" + "&".join(f"job={job_id}" for job_id in done),
        "api": "/docs",
        "sign-in": "/ui/sign-in",
        "not-found": "/ui/jobs/job_" + "0" * 26,
        "report": f"/jobs/{done[0]}/report",
    }
    for name, address in screens.items():
        with open_page(browser, service, width=width, scheme=scheme) as page:
            page.goto(address)
            if name == "new-job-with-profile":
                expect(page.locator("#preview figure svg").first).to_be_visible()
                page.get_by_text("Upload a model from this computer").click()
            look_at(page, name)


def test_jobs_are_sorted_by_any_column_and_stay_so(browser, service):
    with open_page(browser, service) as page:
        page.goto("/ui/jobs")
        sizes = page.locator("td[data-title='size']")
        expect(sizes.nth(1)).to_be_visible()
        for direction in ("ascending", "descending"):
            page.get_by_role("button", name="size").click()
            expect(page.locator("th[aria-sort]")).to_have_attribute("aria-sort", direction)
            # The rows are replaced every two seconds.
            page.wait_for_timeout(2500)
            found = [
                float(value) for value in sizes.evaluate_all("cells => cells.map(cell => cell.dataset.value)") if value
            ]
            assert found == sorted(found, reverse=direction == "descending")
            assert len(found) > 1


def test_a_job_can_be_made_and_cancelled_with_the_keyboard(browser, service):
    with open_page(browser, service) as page:
        page.goto("/")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        while page.evaluate("document.activeElement.textContent") != "New job":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url("**/ui/new")
        while page.evaluate("document.activeElement.id") != "model_id":
            page.keyboard.press("Tab")
        page.keyboard.type("local/tiny")
        while page.evaluate("document.activeElement.id") != "size":
            page.keyboard.press("Tab")
        page.keyboard.type("150kB")
        page.keyboard.press("Enter")
        page.wait_for_url("**/ui/jobs/*")
        while page.evaluate("document.activeElement.textContent") != "Cancel":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".badge").first).to_contain_text("cancelled", timeout=PATIENCE)
        page.get_by_text("Delete this job").click()
        page.get_by_role("button", name="Yes, delete").click()
        page.wait_for_url("**/ui/jobs")


def test_with_keys_users_must_sign_in(browser, tmp_path):
    data = tmp_path / "data"
    service = Service(data, ROCKET_TENANTS_MANAGE_KEYS="true")
    made = subprocess.run(
        [ROCKET, "admin", "keys", "create", "alice", "--data-dir", data], check=True, capture_output=True, text=True
    )
    key = re.search(r"rk_[0-9a-f_]+", made.stdout)[0]
    try:
        with open_page(browser, service) as page:
            page.goto("/ui/profiles")
            assert urlsplit(page.url).path == "/ui/sign-in"
            page.get_by_label("API key").fill("rk_wrong")
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
            page.get_by_label("API key").fill(key)
            page.keyboard.press("Enter")
            page.wait_for_url("**/ui/profiles")
            [cookie] = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
            look_at(page, "signed-in")
            page.get_by_role("link", name="API keys").click()
            page.get_by_label("Label").fill("another")
            page.get_by_role("button", name="Create").click()
            expect(page.locator(".notice[role=status]")).to_contain_text("rk_")
            look_at(page, "keys")
            page.goto("/docs#get-jobs")
            page.get_by_role("button", name="Try it").locator("visible=true").click()
            expect(page.get_by_label("answer of /jobs", exact=True)).to_contain_text('"has_more": false')
            page.goto("/ui/profiles")
            page.goto("/ui/new")
            page.get_by_label("Model", exact=True).fill("local/none")
            page.keyboard.press("Tab")
            # With the session's token, which htmx sends in a header.
            expect(page.locator("#preview")).to_contain_text("no local model with this name")
            page.get_by_role("button", name="Sign out").click()
            page.wait_for_url("**/ui/sign-in")
            page.goto("/")
            assert urlsplit(page.url).path == "/ui/sign-in"
    finally:
        service.close()


def test_a_job_can_be_made_without_scripts(browser, service):
    with open_page(browser, service, java_script_enabled=False) as page:
        page.goto("/ui/new?model_id=local/tiny&samples=4&sequence_length=32&ratio=0.5")
        page.get_by_role("button", name="Compress", exact=True).click()
        page.wait_for_url("**/ui/jobs/*")
        job_id = page.url.rsplit("/", 1)[-1]
        service.finished(job_id)
        page.reload()
        expect(page.get_by_role("heading", name="Download")).to_be_visible()


def test_a_result_is_healed_from_its_page(browser, service):
    done = [job["id"] for job in service.client.get("/jobs?status=succeeded").json()["data"]]
    curve = "figure[data-figure='loss-curve'] svg"
    with open_page(browser, service) as page:
        page.goto(f"/ui/jobs/{done[-1]}")
        page.get_by_text("Heal this result").click()
        page.get_by_label("Tokens to train on").fill("200k")
        page.get_by_role("button", name="Heal", exact=True).click()
        # Drawn while the job runs, and again from its report.
        expect(page.locator(curve).first).to_be_visible(timeout=PATIENCE)
        finish(page)
        expect(page.locator(curve).first).to_be_visible()
        expect(page.locator(".headline", has_text="Quality")).to_contain_text("→")
        assert service.client.get(f"/jobs/{page.url.rsplit('/', 1)[-1]}").json()["source_job_id"] == done[-1]
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            look_at(page, "healed")


def test_the_browser_notifies_of_an_end_and_deleting_asks(browser, service):
    with open_page(browser, service, permissions=["notifications"]) as page:
        page.add_init_script(
            "window.Notification = class extends Notification { constructor(title, options) { super(title, options);"
            " sessionStorage.setItem('notified', `${title}: ${options.body}`); } };"
        )
        page.goto("/ui/new?model_id=local/tiny&samples=4&sequence_length=32&ratio=0.4")
        expect(page.locator("#preview")).to_contain_text("parameters")
        page.get_by_role("button", name="Compress", exact=True).click()
        finish(page)
        assert page.evaluate("sessionStorage.getItem('notified')") == "Rocket: local/tiny is done"
        job = page.url.rpartition("/")[2]
        page.get_by_text("Delete this job").click()
        expect(page.get_by_text("are deleted as well")).to_be_visible()
        assert service.client.get(f"/jobs/{job}").status_code == 200
        page.get_by_role("button", name="Yes, delete").click()
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    assert service.client.get(f"/jobs/{job}").status_code == 404
