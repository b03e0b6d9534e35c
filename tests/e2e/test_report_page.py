"""The report in a real browser: nothing overflows, nothing fails, the tables sort."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetta.commands.report import make_report
from report.synthetic_results import broken_runs, nine_methods, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
api = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

SIZES = [(375, "light"), (375, "dark"), (1280, "light"), (1280, "dark")]
OVERFLOWING = """() => {
  const wide = document.documentElement.clientWidth;
  const out = [...document.querySelectorAll("svg, figure, .scroll, p, h1, h2, h3, details, pre")]
    .filter((e) => e.getBoundingClientRect().right > wide + 0.5 && !e.closest(".scroll svg"))
    .map((e) => e.tagName + "#" + e.id);
  return [document.documentElement.scrollWidth - wide, out];
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    many = nine_methods(root / "many", (42, 43), steps=60)
    # Long names are what breaks layouts.
    write_run(many, variant="a_rather_long_variant_name_of_an_ablation,lr=1e-3", steps=60)
    write_run(root / "one", steps=60)
    return {
        "many": make_report([many], root / "many.html"),
        "one": make_report([root / "one"], root / "one.html"),
        "broken": make_report([broken_runs(root / "bad")], root / "broken.html"),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, page: Path, width: int = 1280, scheme: str = "light") -> tuple[Any, list]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(60_000)
    tab = context.new_page()
    troubles: list[str] = []
    tab.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on("request", lambda r: None if r.url == page.as_uri() else troubles.append(r.url))
    tab.goto(page.as_uri())
    return tab, troubles


@pytest.mark.parametrize("name", ["many", "one", "broken"])
@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_opens_cleanly_and_fits(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    tab, troubles = opened(browser, pages[name], width, scheme)
    assert tab.evaluate(OVERFLOWING) == [0, []]
    tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert tab.evaluate(OVERFLOWING) == [0, []]
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    assert troubles == []
    tab.context.close()


def test_tables_sort_by_click(browser: Any, pages: dict[str, Path]) -> None:
    tab, _ = opened(browser, pages["many"])
    column = "t => [...t.tBodies[0].rows].map(r => Number(r.cells[1].dataset.sort))"
    table = tab.locator("table").first
    head = table.locator("thead button").nth(1)
    head.click()
    values = table.evaluate(column)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 5
    assert table.locator("th").nth(1).get_attribute("aria-sort") == "descending"
    head.click()
    assert table.evaluate(column) == sorted(values)
    table.locator("thead button").first.click()
    names = table.evaluate("t => [...t.tBodies[0].rows].map(r => r.cells[0].textContent)")
    assert names == sorted(names, key=str.lower)
    tab.context.close()


def test_blank_cells_sort_last_both_ways(browser: Any, pages: dict[str, Path]) -> None:
    tab, _ = opened(browser, pages["many"])
    table = tab.locator("table").first
    for _ in range(2):
        table.locator("thead button").nth(2).click()  # the gain; the unadapted model has none
        last = table.evaluate("t => t.tBodies[0].rows[t.tBodies[0].rows.length - 1].textContent")
        assert last.startswith("No adaptation")
    tab.context.close()


def test_the_theme_turns_and_figures_follow(browser: Any, pages: dict[str, Path]) -> None:
    tab, _ = opened(browser, pages["one"])
    paper = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('figure svg text')).fill"
    light = tab.evaluate(paper), tab.evaluate(text)
    tab.locator("#theme").click()
    dark = tab.evaluate(paper), tab.evaluate(text)
    assert light[0] == "rgb(255, 255, 255)"
    assert light[1] == dark[0].replace("20, 23, 28", "28, 32, 38")
    assert dark == ("rgb(20, 23, 28)", "rgb(232, 234, 238)")
    tab.context.close()


def test_every_picture_and_identifier_is_accessible(browser: Any, pages: dict[str, Path]) -> None:
    tab, _ = opened(browser, pages["many"])
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    titles = tab.evaluate(
        "[...document.querySelectorAll('figure svg > title')].map(t => t.textContent)"
    )
    assert len(titles) >= 6
    assert all(len(title) > 30 for title in titles)
    dangling = tab.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"], [aria-labelledby]')]"
        ".map(e => e.getAttribute('aria-labelledby') ?? e.getAttribute('href').slice(1))"
        ".filter(id => !document.getElementById(id))"
    )
    assert dangling == []
    tab.context.close()
