"""A region's text beside its kernel: which lines of the one compute what a line of the other does.

Generated code has the region's names. A line of a kernel belongs to a value if it assigns it, loads
it, adds to its sum or stores it, and to none where that is not plain to see.
"""

from __future__ import annotations

import re
from html import escape

_DEFINED = re.compile(r"(?:input|output)\s+(\w+):|(\w+)\s+=\s")
_COMMENT = re.compile(r"\s*(?://|#)")
_REGION = re.compile(r"^(//|#) region .*\n(?:\1 .*\n)*", re.MULTILINE)
# const Vec x = ..., x = tl.load(...), Vec held_x = ...
_ASSIGNED = re.compile(r"\s*(?:const\s+)?(?:[\w:<>]+\s+)?(?:held_|acc_)?(\w+)(?:\[\w+\])?\s+=\s")
# accumulate<Sum>(acc_x[slot], ...), accumulate<Sum>(held_x, ...)
_ADDED = re.compile(r"\s*accumulate<\w+>\((?:acc_|held_)(\w+)\b")
# put(p_y, ...), Row::write(p_y, ...), tl.store(p_y, ...)
_STORED = re.compile(r"\s*(?:[\w.:]*(?:put|write\w*|store))\(p_(\w+)\b")
# slots_x.read(x, ...)
_READ = re.compile(r"\s*slots_\w+\.read\((\w+)\b")


def region_lines(text: str) -> str:
    """A region's text, each line that defines a value marked with it."""
    return "\n".join(_marked(line, _defined(line)) for line in text.splitlines())


def kernel_lines(source: str, text: str) -> str:
    """A kernel's text, each line that computes a value of the region marked with it. The region
    that stands in front of it is left out: it stands beside it.
    """
    values = {name for line in text.splitlines() if (name := _defined(line))}
    lines = without_region(source).splitlines()
    return "\n".join(_marked(line, computed(line, values)) for line in lines)


def without_region(source: str) -> str:
    """A kernel's text without the comment that repeats its region."""
    return _REGION.sub("", source, count=1)


def computed(line: str, values: set[str]) -> str | None:
    """The value that a line of a kernel computes, loads or stores; None if none."""
    if _COMMENT.match(line):
        return None
    for form in (_ADDED, _STORED, _READ, _ASSIGNED):
        match = form.match(line)
        if match and match[1] in values:
            return match[1]
    return None


def _defined(line: str) -> str | None:
    match = _DEFINED.match(line)
    return (match[1] or match[2]) if match else None


def _marked(line: str, value: str | None) -> str:
    return f'<span data-v="{value}">{escape(line)}</span>' if value else escape(line)
