"""Charts and tables of docs/speed, and the home page's chart, made from bench/results.

    python -m scripts.speed_pages [--check]

Every figure is read from a committed result: nothing is measured here. `--check` writes nothing
and exits 1 if a chart or a table is not current. Charts need the extra `demo`, for matplotlib; the
bytes of a checked-in chart are those of the version in constraints-dev.txt.
"""
