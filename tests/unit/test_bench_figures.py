"""The tables of the benchmarks say what their figures say."""

from __future__ import annotations

import json

from bench.figures import LIMIT, OURS, PEER, Row, Table


def a_table(**ours: float) -> Table:
    rows = [
        Row("copy", LIMIT, [0.010, 0.040, 0.020]),
        Row("holdfast", OURS, [0.011, 0.044, 0.022], **ours),
        Row("other", PEER, word="not installed"),
    ]
    return Table("stall", "Stall", "ms", rows, limit="copy")


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    table = a_table()
    table.rows[1].values = [0.020, 0.040, 0.030]  # the medians alone would say 1.5, and so do these
    assert table.ratio(table.rows[1]) == 1.5
    table.rows[1].values = [0.020, 0.040, 0.020]  # the medians say 1 here too, but for a lower one
    assert table.ratio(table.rows[1]) == 1.0


def test_a_target_is_met_or_missed_by_ratio_or_by_figure() -> None:
    table = a_table(at_most=1.2)
    assert table.verdict(table.rows[1]) == "≤ 1.2 ×: met"
    table = a_table(at_most=1.05)
    assert table.verdict(table.rows[1]) == "≤ 1.05 ×: missed"
    table = a_table(at_most_value=0.01)
    assert table.verdict(table.rows[1]) == "≤ 10.0 ms: missed"


def test_who_has_no_figures_is_in_the_table_with_a_word() -> None:
    table = a_table(at_most=1.2)
    assert "| other |  | not installed |" in table.markdown()
    assert "not installed" in table.text()


def test_a_table_comes_back_from_its_record_as_it_was() -> None:
    table = a_table(at_most=1.2)
    assert Table.of(json.loads(json.dumps(table.record()))) == table
