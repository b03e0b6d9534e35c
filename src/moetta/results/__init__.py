"""Results: runs on disk, groups of seeds, and the tables made from them. Imports no torch.

`load_runs` reads folders of runs, `aggregate` groups them by everything but the seed.

>>> from moetta.results import Stat
>>> Stat((61.0, 63.0)).mean
62.0
"""

from moetta.results.groups import (
    BASELINE,
    Comparison,
    Group,
    Stat,
    aggregate,
    compare,
    make_group,
    slug,
)
from moetta.results.published import Printed, Published
from moetta.results.records import filter_runs, records, sort_records
from moetta.results.runs import (
    Problem,
    Run,
    find_runs,
    load_card,
    load_run,
    load_runs,
    number,
    protocol_key,
)
from moetta.results.tables import (
    Column,
    Entry,
    Table,
    beside,
    beside_columns,
    entry,
    mean_only,
    table,
    to_csv,
    to_latex,
    to_markdown,
    write_tables,
)

__all__ = [
    "BASELINE",
    "Column",
    "Comparison",
    "Entry",
    "Group",
    "Printed",
    "Problem",
    "Published",
    "Run",
    "Stat",
    "Table",
    "aggregate",
    "beside",
    "beside_columns",
    "compare",
    "entry",
    "filter_runs",
    "find_runs",
    "load_card",
    "load_run",
    "load_runs",
    "make_group",
    "mean_only",
    "number",
    "protocol_key",
    "records",
    "slug",
    "sort_records",
    "table",
    "to_csv",
    "to_latex",
    "to_markdown",
    "write_tables",
]
