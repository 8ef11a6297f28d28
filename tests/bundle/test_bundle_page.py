"""The page of `funcrt inspect --html`."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from funcrt.bundle.facts import BundleFacts, know
from funcrt.bundle.proof.certificate import Certificate, Check, find_certificate
from funcrt.cli import charts
from funcrt.cli.page import render
from tests.commands import run_here

import pytest

DECODE = "decode_b2_t1_s16"
VOID = {"meta", "rect", "line", "path", "circle"}


@pytest.fixture(scope="module")
def facts(folder: Path) -> BundleFacts:
    return know(folder)


class Reader(HTMLParser):
    """What a page holds; fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read_page(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def make_certificate(*checks: Check) -> Certificate:
    return Certificate(
        manifest="", files={}, target="cpu", device="a <device>", mlx="1", funcrt="2",
        date="2026-01-02T03:04:05+00:00", seconds=1.0, checks=checks,
    )  # fmt: skip


def test_the_page_needs_nothing_else(facts: BundleFacts, folder: Path) -> None:
    certificate = find_certificate(folder, facts.digest)
    page = render(facts, certificate)
    reader = read_page(page)
    assert not {"script", "link", "img", "iframe", "base"} & set(reader.tags)
    loading = {"src", "href", "srcset", "action", "style"}
    assert not [name for name, _ in reader.attributes if name in loading or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", page)
    keys = [f.entry.key for target in facts.targets for f in target.functions]
    assert set(keys) <= set(reader.words)
    assert reader.tags.count("figure") == 2 + (certificate is not None)
    ids = [value for name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    named = [value for name, value in reader.attributes if name.startswith("aria-") and
             name.endswith("by")]  # fmt: skip
    assert set(named) <= set(ids)


def test_the_page_shows_every_target(facts: BundleFacts) -> None:
    (target,) = facts.targets
    page = render(replace(facts, targets=(target, replace(target, device="metal"))), None)
    assert [word for word in read_page(page).words if word.startswith("Functions for")] == [
        "Functions for cpu",
        "Functions for metal",
    ]


def test_names_are_text_on_the_page(facts: BundleFacts) -> None:
    hostile = replace(facts, folder=Path('<script>alert("&")</script>'))
    check = Check("<b>", "error", 1.0, 2.0, note="</table><script>")
    reader = read_page(render(hostile, make_certificate(check)))
    assert "script" not in reader.tags
    assert "b" not in [tag for tag in reader.tags if tag == "b"][5:]  # those of the five tiles
    assert any("a <device> (cpu)" in word for word in reader.words)


def test_the_page_tells_failed_checks_first(facts: BundleFacts) -> None:
    page = render(facts, make_certificate(
        Check("prefill_b2_t4_s16", "error", 1e-7, 2e-5),
        Check("prefill_b2_t4_s16", "tokens", 0, 0),
        Check(DECODE, "error", math.inf, 2e-5),
        Check(DECODE, "tokens", 3, 0),
    ))  # fmt: skip
    reader = read_page(page)
    assert any("FAILED 2 of 4 checks" in word for word in reader.words)
    assert any(f"These failed: {DECODE}." in word for word in reader.words)
    assert "1 of 2 are not (rows or tokens that differ)" in reader.words
    table = page[page.index("All 4 checks") :]
    assert table.index(DECODE) < table.index("prefill_b2_t4_s16")
    assert "not finite" in table


def test_the_page_is_written_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "päge.html"
    assert run_here("inspect", folder, "--html", page).returncode == 0
    page.write_text("old", "utf-8")
    link = tmp_path / "link.html"
    link.symlink_to(page)
    done = run_here("inspect", folder, "--html", link)
    assert (done.returncode, done.stdout) == (0, f"{page}\n")
    assert link.is_symlink()
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "none" / "page.html", Path("/dev/null")):
        done = run_here("inspect", folder, "--html", path)
        assert done.returncode == 1
        assert str(path) in done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"päge.html", "link.html", "folder"}


def test_the_page_does_not_go_into_the_bundle(folder: Path, tmp_path: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    (tmp_path / "link.html").symlink_to(folder / "manifest.json")
    pages = (folder / "manifest.json", folder / "page.html", tmp_path / "link.html")
    for path in pages:
        done = run_here("inspect", folder, "--html", path)
        assert done.returncode == 1
        assert "is inside the bundle" in done.stderr
    assert (folder / "manifest.json").read_bytes() == before
    assert not (folder / "page.html").exists()


def test_points_stand_where_their_numbers_are() -> None:
    points = [
        charts.Point("a", "a", 0, 1e-5, True),
        charts.Point("b", "b", 1e-6, 1e-5, True),
        charts.Point("c", "c", 1e-4, 1e-5, False),
        charts.Point("d", "d", math.nan, 1e-5, False),
    ]
    chart = charts.draw_points(charts.Chart("", ""), points)
    marks = [mark for mark in chart.marks if mark.tag == "path"]
    assert [mark.attributes["class"] for mark in marks] == ["dot", "dot", "cross", "cross"]
    places = [float(mark.attributes["d"][1:].split()[0]) for mark in marks]
    assert places == sorted(places)
    limits = [m.attributes["x1"] for m in chart.marks if m.attributes["class"] == "allowed"]
    assert len(set(limits)) == 1
    assert places[1] < limits[0] < places[2]
    assert places[2] - limits[0] == pytest.approx(limits[0] - places[1], abs=8.5)  # a decade each


def test_charts_of_nothing_are_drawn() -> None:
    for chart in (
        charts.draw_points(charts.Chart("", ""), []),
        charts.draw_panels(charts.Chart("", ""), [], [], [charts.Panel("a", [], str)]),
        charts.draw_panels(charts.Chart("", ""), ["a"], ["a"], [charts.Panel("a", [0], str)]),
        charts.draw_stacks(charts.Chart("", ""), ["a"], [charts.Stack("b", [0], "")], str),
    ):
        assert chart.width > 0
        assert chart.height > 0
