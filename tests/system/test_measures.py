"""What a browser shows of measures that people choose: colours of the allocation map, and targets of a profile."""

import pytest
from playwright.sync_api import expect

from tests.system.test_browser import (  # noqa: F401  # fixtures
    PATIENCE,
    SCHEMES,
    WIDTHS,
    browser,
    finish,
    hub,
    look_at,
    open_page,
    service,
)

pytestmark = pytest.mark.system

MAP = "figure[data-figure='allocation-map']"


@pytest.fixture(scope="module")
def profile_address(browser, service):  # noqa: F811
    """Return the address of a profile that counts bytes."""
    with open_page(browser, service) as page:
        page.goto("/ui/new?model_id=local/tiny&samples=4&sequence_length=32")
        expect(page.locator("#preview")).to_contain_text("enter the size")
        page.get_by_label("size", exact=True).fill("150kB")
        page.get_by_role("button", name="Compress", exact=True).click()
        finish(page)
        return page.locator("a[href*='/ui/profiles/prof_']").first.get_attribute("href")


def fills(page):
    return page.locator(f"{MAP} svg [aria-hidden] rect, {MAP} svg rect").evaluate_all(
        "found => found.map((rect) => rect.getAttribute('fill')).filter(Boolean)"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_is_coloured_by_any_measure(browser, service, profile_address, width, scheme):  # noqa: F811
    with open_page(browser, service, width=width, scheme=scheme) as page:
        page.goto(profile_address)
        chosen = page.locator(MAP).get_by_label("Coloured by")
        expect(chosen).to_have_value("bits_per_weight")
        names = chosen.locator("option").evaluate_all("found => found.map((option) => option.value)")
        assert {"kind", "stored_bytes", "kept_fraction", "loss", "error"} < {*names}
        seen = set()
        for name in names:
            chosen.select_option(name)
            if name == "kind":
                expect(page.locator(f"{MAP} .plot")).to_contain_text("quantized")
            else:
                title = chosen.locator("option:checked").inner_text()
                expect(page.locator(f"{MAP} .plot")).to_contain_text(title)
            look_at(page, f"map-{name}")
            seen.add(tuple(fills(page)))
        assert len(seen) > 3
        # A new prediction keeps the colours.
        chosen.select_option("kind")
        before = page.locator("#what-if .value").first.inner_text()
        page.get_by_label("bits per weight", exact=True).fill("5")
        expect(page.locator("#what-if .value").first).not_to_have_text(before)
        expect(page.locator(MAP).get_by_label("Coloured by")).to_have_value("kind")


def test_a_profile_answers_sizes_and_bits(browser, service, profile_address):  # noqa: F811
    with open_page(browser, service) as page:
        page.goto(profile_address)
        expect(page.get_by_label("Fit into a size")).to_be_checked()
        size = page.locator("#what-if .value").first
        before = size.inner_text()
        page.get_by_label("bits slider").fill("4")
        expect(page.get_by_label("Bits per weight of the layers")).to_be_checked()
        expect(page.get_by_label("bits per weight", exact=True)).to_have_value("4")
        expect(size).not_to_have_text(before)
        bits = float(page.locator("#what-if .value").nth(1).inner_text())
        assert 3 < bits <= 4
        look_at(page, "what-if-bits")
        page.get_by_role("link", name="Compress to 4 bits per weight").click()
        expect(page.locator("#preview")).to_contain_text("skips the calibration", timeout=PATIENCE)
        expect(page.get_by_label("Bits per weight of the layers")).to_be_checked()
