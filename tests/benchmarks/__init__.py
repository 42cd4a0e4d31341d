"""Times, told and never judged: `nox -s bench`, or `python -m tests.benchmarks`."""
