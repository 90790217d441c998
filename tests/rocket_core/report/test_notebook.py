"""Reports as notebooks show them."""

import sys
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace

from rocket_core.evaluation import EvaluationResult
from rocket_core.report.notebook import compression_html, show_in_notebooks, speed_html, table_html
from rocket_core.report.quality import Difference, ModelQuality
from rocket_core.report.verdict import Verdict
from tests.reference.reports import report_of_layers
from tests.reference.speed import model_speed, speed_report


class Cells(HTMLParser):
    """The text of each cell, by row."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.captions, self._inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside in {"td", "th"}:
            self.rows[-1][-1] += data
        elif self._inside == "caption":
            self.captions.append(data)


def test_a_compression_shows_sizes_speed_and_time():
    speed = speed_report(model_speed("other"))
    report = report_of_layers().model_copy(update={"speed": speed})
    shown = Cells(compression_html(report))
    assert shown.captions[1:] == ["Files", f"Speed: {speed.conditions}"]
    assert shown.captions[0].startswith(report.model)
    assert ["rocket", "832 bytes"] in shown.rows
    assert [row[0] for row in shown.rows[:3]] == ["Size", "Quality", "Time"]
    assert Cells(speed_html(speed)).rows[1][0] == "original"


def test_a_verdict_is_among_the_figures_of_a_compression():
    verdict = Verdict(outcome="anomalous", bounds=(), reasons=("loss: 1 higher", "<b>"))
    shown = Cells(compression_html(report_of_layers().model_copy(update={"verdict": verdict})))
    assert ["Verdict", "anomalous", "loss: 1 higher; <b>"] in shown.rows


class ZMQInteractiveShell:
    """Named like the shell of a notebook, with what IPython's formatters do."""

    def __init__(self):
        self.functions = {}
        formatter = SimpleNamespace(for_type=self.functions.__setitem__)
        self.display_formatter = SimpleNamespace(formatters={"text/html": formatter})


def test_a_notebook_shows_reports_as_tables(monkeypatch):
    shell = ZMQInteractiveShell()
    module = ModuleType("IPython")
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    show_in_notebooks()
    report = report_of_layers()
    assert shell.functions[type(report)](report) == compression_html(report)


def test_an_interpreter_shows_a_line_rather_than_pages():
    report = report_of_layers()
    assert len(repr(report)) < 200
    assert report.model in repr(report)
    assert str(report) == repr(report)
    assert "frontier" not in repr(report.layers[0])


def test_words_are_aligned_to_the_left_and_numbers_to_the_right():
    words, numbers = (
        table_html("c", (), [("Size", "1 MB", "was 2 MB")], words=True),
        table_html("c", ("", "x"), [("a", "1")]),
    )
    assert "text-align:right" not in words
    assert '<td style="text-align:right;white-space:nowrap">1</td>' in numbers
    for table in (words, numbers):
        assert '<caption style="text-align:left">' in table
        assert '<th scope="row" style="text-align:left">' in table


def test_an_evaluation_has_a_column_for_each_model():
    alone = EvaluationResult(
        model="out/rocket",
        file_bytes=832,
        text="mine.txt",
        sequence_length=8,
        stride=8,
        windows=2,
        tokens=14,
        negative_log_likelihood=1.0,
        perplexity=2.718,
        device="cpu",
        dtype="float32",
    )
    assert Cells(alone._repr_html_()).rows == [["", "out/rocket"], ["file", "832 bytes"], ["perplexity", "2.718"]]
    before = ModelQuality(negative_log_likelihood=0.5, perplexity=1.649)
    compared = alone.model_copy(
        update={
            "against": "original",
            "against_bytes": 1000,
            "dense": before,
            "difference": Difference(kl_divergence=0.5),
        }
    )
    assert Cells(compared._repr_html_()).rows == [
        ["", "original", "out/rocket"],
        ["file", "1.00 kB", "832 bytes"],
        ["perplexity", "1.649", "2.718"],
        ["KL divergence, nats per token", "", "0.5000"],
    ]


def test_names_cannot_become_markup():
    name = "<script>alert(1)</script>"
    text = table_html(name, (name,), [(name,)])
    assert "<script" not in text
    assert Cells(text).rows == [[name], [name]]
