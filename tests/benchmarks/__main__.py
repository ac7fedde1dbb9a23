"""Which results of the benchmarks are stale, and the tables that show them:

python -m tests.benchmarks             # of each benchmark: its date, whether it is stale, and which files changed
python -m tests.benchmarks --write     # write the tables of tests/README.md and of the steps' measurements.md again
"""

import argparse

from tests.benchmarks.kept import NAMES, changed_files, load
from tests.benchmarks.tables import PAGES, with_tables
from tests.harness.ranks import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages' tables from the results")
    if parser.parse_args().write:
        for page in PAGES:
            text = (ROOT / page).read_text("utf-8")
            (ROOT / page).write_text(with_tables(page, text), "utf-8")
            print(f"written: {page}" if text != with_tables(page, text) else f"as it was: {page}")
    for name in NAMES:
        results = load(name)
        changed = changed_files(results)
        print(f"{name:<18} {results['hardware']['date']}  {'stale: ' + ', '.join(changed) if changed else 'fresh'}")


if __name__ == "__main__":
    main()
