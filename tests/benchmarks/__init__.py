"""Figures, some with a bound: `nox -s bench`, or `python -m tests.benchmarks`. See `frame.py` for how to add one."""
