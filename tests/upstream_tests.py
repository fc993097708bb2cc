"""PyTorch's own test files with the rules in eager mode and without: what passes must pass.

    python tests/upstream_tests.py PYTORCH/test          or: make upstream ARGS=PYTORCH/test

PYTORCH is a checkout of the version that is installed. A file is run twice, in processes that share
nothing; a test that is expected to fail and does not counts as passed. The exit status is 1 if the
rules break a test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "test_ops_gradients.py",
    "test_ops_fwd_gradients.py",
    "functorch/test_vmap.py",
    "functorch/test_eager_transforms.py",
)
PASSED, FAILED, SKIPPED, MISSING = "passed", "failed", "skipped", "missing"
Outcomes = dict[str, tuple[str, int]]


def pytest_configure() -> None:
    """This module is a plugin of the pytest that runs a file with the rules."""
    import normpass

    normpass.register(eager=True)


def outcome(case: ElementTree.Element) -> tuple[str, int]:
    """What became of a test, by the elements that pytest's report has for it, and how many of its
    parts (subTest) failed.
    """
    bad = [child for child in case if child.tag in ("failure", "error")]
    if any("Unexpected success" in f"{b.get('message')}{b.text}" for b in bad):
        return PASSED, 0
    if bad or any(child.get("type") == "pytest.xfail" for child in case):
        return FAILED, len(bad)
    return (SKIPPED if any(child.tag == "skipped" for child in case) else PASSED), 0


def read(report: Path) -> Outcomes:
    """The tests of a report by class and name. Raises SystemExit if the run left none."""
    if not report.exists():
        raise SystemExit(f"{report}: the run ended before it wrote this report")
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}


def run(file: Path, rules: bool, options: argparse.Namespace) -> Outcomes:
    """Runs a file in the folder where it lies, from which it imports its helpers."""
    report = (options.out / f"{file.stem}.{'rules' if rules else 'stock'}.xml").resolve()
    if options.keep and not rules and report.exists():
        return read(report)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", file.name]
    command += ["-n", str(options.jobs), "-k", options.only, f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider", *(["-p", Path(__file__).stem] if rules else [])]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with report.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(
            command,
            cwd=file.parent,
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            check=False,
        )
    return read(report)


def broken(before: Outcomes, after: Outcomes) -> list[str]:
    """The tests that pass and with the rules do not, and those of which more fails."""
    found = []
    for test, (was, parts) in before.items():
        now, failed = after.get(test, (MISSING, 0))
        if was == PASSED != now or failed > parts:
            found.append(test)
    return found


def repaired(before: Outcomes, after: Outcomes) -> list[str]:
    failed = [test for test, (was, _) in before.items() if was == FAILED]
    return [test for test in failed if after.get(test, (MISSING, 0))[0] == PASSED]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("tests", type=Path, help="the folder test/ of a checkout of PyTorch")
    parser.add_argument("--files", default=",".join(FILES), help="separated by commas")
    parser.add_argument("--only", default="norm", help="an expression of pytest's -k")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--out", type=Path, default=Path("build/upstream"), help="folder")
    parser.add_argument("--keep", action="store_true", help="take the last stock run, if any")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    files = [options.tests.resolve() / name for name in options.files.split(",")]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise SystemExit(f"no such file: {', '.join(missing)}")
    lost = 0
    for file in files:
        before, after = run(file, False, options), run(file, True, options)
        for title, outcomes in (("stock", before), ("with the rules", after)):
            counts = Counter(kind for kind, _ in outcomes.values())
            told = ", ".join(f"{counts[kind]} {kind}" for kind in (PASSED, FAILED, SKIPPED))
            print(f"{file.name}, {title}: {told}", flush=True)
        for title, tests in (
            ("broken", broken(before, after)),
            ("repaired", repaired(before, after)),
        ):
            for test in tests:
                print(f"  {title}: {test}")
        lost += len(broken(before, after))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
