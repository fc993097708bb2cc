"""The console script `normpass`, also `python -m normpass`."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Placeholder."""
    raise SystemExit("not written yet")


if __name__ == "__main__":
    raise SystemExit(main())
