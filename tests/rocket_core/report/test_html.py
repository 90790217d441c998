"""The report as a page: complete, self-contained, and safe against names that contain markup."""

import base64
import json
import re
from html.parser import HTMLParser

from rocket_core.report.html import cell_text, render_report
from tests.reference.reports import empty_report, layer_named, report_of_layers
from tests.reference.speed import model_speed, speed_report


class Elements(HTMLParser):
    """All elements with their attributes, and the content of scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)


def test_the_page_needs_no_other_file():
    elements = Elements(render_report(report_of_layers()))
    addresses = [given[name] for _, given in elements.found for name in ("src", "href") if name in given]
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert not [tag for tag, _ in elements.found if tag in {"link", "img", "iframe", "object"}]
    assert len([tag for tag, _ in elements.found if tag == "style"]) == 1


def test_each_figure_has_its_data_as_table_and_json():
    text = render_report(report_of_layers())
    elements = Elements(text)
    drawn = [json.loads(script) for script in elements.scripts if script.startswith('{"')]
    assert [figure["name"] for figure in drawn] == [
        "allocation-map",
        "errors-by-size",
        "predicted-and-achieved",
        "stage-times",
    ]
    links = re.findall(r"data:application/json;charset=utf-8;base64,([A-Za-z0-9+/=]+)", text)
    *figures, costs = [json.loads(base64.b64decode(link)) for link in links]
    assert figures == drawn
    # Only a table.
    assert costs["name"] == "cost-comparison"


def test_names_are_escaped():
    layer = layer_named("</script><script>alert(1)</script>")
    report = report_of_layers().model_copy(update={"layers": (layer,), "model": "<img src=x onerror=alert(1)>"})
    elements = Elements(render_report(report))
    assert not [tag for tag, _ in elements.found if tag == "img"]
    assert not [script for script in elements.scripts if script.startswith("alert")]


def test_a_report_without_layers_or_evaluation_is_rendered():
    text = render_report(empty_report())
    assert "Nothing to draw" in text
    assert "predicted, not measured" in text


def test_speed_is_a_table_if_it_was_measured():
    speed = speed_report(model_speed("rocket", generation_rate=75, generation_ratio=1.5))
    text = render_report(empty_report().model_copy(update={"speed": speed}))
    assert "<h2>Speed</h2>" in text
    assert '<td class="number">75 (1.50x)</td>' in text
    assert "Not measured: gguf: llama.cpp is not installed" in text
    assert "<h2>Speed</h2>" not in render_report(empty_report())


def test_cells_are_formatted_by_the_kind_of_their_column():
    assert [cell_text(None, "count"), cell_text(12345, "count"), cell_text("x", "text")] == ["-", "12,345", "x"]
    assert [cell_text(0.5, "fraction"), cell_text(0.123456, "number")] == ["50.0%", "0.1235"]
    assert [cell_text(0.0765, "energy"), cell_text(5_490_000, "bytes")] == ["76.5 Wh", "5.49 MB"]
    assert cell_text(61.0, "seconds") == "1 min 01 s"
