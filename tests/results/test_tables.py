from __future__ import annotations

import csv
import io
import re

from moetta.report.html import to_html
from moetta.results.groups import Stat
from moetta.results.tables import (
    Column,
    Entry,
    entry,
    table,
    to_csv,
    to_latex,
    to_markdown,
)

COLUMNS = [Column("Method"), Column("Accuracy", "%", best="high"), Column("Time", "s", 0, "low")]
ROWS = [
    [Entry("a_1"), Entry(66.154, 0.061), Entry(3.0)],
    [Entry("b|c"), Entry(64.35, 0.07), Entry(1.0)],
    [Entry("<i>d"), Entry(-1.0), Entry(None)],
]
TABLE = table("t", "A & B", COLUMNS, ROWS, ["a note"])


def test_best_is_bold_and_second_underlined_by_the_direction_of_the_column() -> None:
    ranks = [[item.rank for item in row] for row in TABLE.rows]
    assert ranks == [[0, 1, 2], [0, 2, 1], [0, 0, 0]]


def test_values_that_read_the_same_share_a_rank() -> None:
    rows = [[Entry("a"), Entry(1.001)], [Entry("b"), Entry(1.002)], [Entry("c"), Entry(0.5)]]
    made = table("t", "", COLUMNS[:2], rows)
    assert [row[1].rank for row in made.rows] == [1, 1, 2]
    level = table("t", "", COLUMNS[:2], rows[:2])
    assert [row[1].rank for row in level.rows] == [0, 0]  # no best among equals


def test_empty_columns_are_dropped() -> None:
    made = table("t", "", COLUMNS, [[Entry("a"), Entry(1.0), Entry(None)]])
    assert [column.title for column in made.columns] == ["Method", "Accuracy"]


def test_csv_keeps_precision_and_gives_spread_its_own_column() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows[0] == ["Method", "Accuracy, %", "Accuracy, % (sd)", "Time, s"]
    assert rows[1] == ["a_1", "66.154", "0.061", "3.0"]
    assert rows[3] == ["<i>d", "-1.0", "", ""]


def test_markdown_marks_and_escapes() -> None:
    text = to_markdown(TABLE)
    assert "| a_1 | **66.15** ± 0.06 | <u>3</u> |" in text
    assert r"| b\|c | <u>64.35</u> ± 0.07 | **1** |" in text
    assert text.endswith("a note\n")


def test_latex_marks_and_escapes() -> None:
    text = to_latex(TABLE)
    assert r"a\_1 & \textbf{66.15}$_{\pm 0.06}$ & \underline{3} \\" in text
    assert r"\caption{A \& B}" in text
    assert text.count("{tabular}") == 2
    assert re.search(r"[^\\]%", text.split("\\midrule")[1].split("\\bottomrule")[0]) is None


def test_html_has_headers_sort_keys_and_no_injection() -> None:
    text = to_html(TABLE, "x_files")
    assert '<th scope="row">&lt;i&gt;d</th>' in text
    assert "<i>" not in text
    assert text.count('scope="col"') == 3
    assert text.count('scope="row"') == 3
    assert '<td data-sort="66.154"><strong>66.15</strong><sub' in text
    assert 'href="x_files/t.tex"' in text


def test_signs_and_zero() -> None:
    column = Column("x", best=None)
    made = table("t", "", [Column("m"), column], [[Entry("a"), Entry(v, signed=True)] for v in
                                                  (1.5, -1.5, -0.001)])  # fmt: skip
    text = to_markdown(made)
    assert "+1.50" in text
    assert "\N{MINUS SIGN}1.50" in text
    assert "| 0.00 |" in text


def test_sd_is_unbiased() -> None:
    assert entry(Stat((1.0, 3.0))) == Entry(2.0, 2**0.5)
    assert entry(Stat((1.0,))).sd is None
