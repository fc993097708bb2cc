"""Runs the programs and commands of a page, one after the other, as its reader would.

    python tests/page_runner.py docs/start.md

A block of `python` runs with the names of those before it, in a folder of its own; one that begins
with `# model.py` is that file as well. A line of `shell` or `sh` that calls normpass is run too.
The block of `text` that follows is what was printed, where `...` stands for anything. What differs
is said, with its line, and ends the run with status 1.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pages import ROOT, Page

from normpass.__main__ import main

if TYPE_CHECKING:
    from pages import Block

FILE = re.compile(r"# ([\w/]+\.py)\n")
# Exit statuses that a page may show: success, and that something was found.
SHOWN = (0, 1)


def printed(page: Page, block: Block, module: ModuleType) -> str:
    """What a block prints; nothing where it is neither a program nor a command of ours.

    Its lines have the page's numbers, and the page is their file: that is where Dynamo, pickle and
    tracebacks look for them.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if block.language == "python":
            if name := FILE.match(block.text):
                Path(name[1]).write_text(block.text + "\n", encoding="utf-8")
            above = "\n" * (block.line - 1)
            exec(compile(above + block.text, str(ROOT / page.path), "exec"), vars(module))
        elif block.language in ("shell", "sh"):
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["normpass"]:
                    status = main(words[1:])
                    assert status in SHOWN, f"{line}: status {status}"
    return out.getvalue()


def as_shown(found: str, shown: str) -> bool:
    """Whether a page shows what was printed, up to blanks at ends of lines and what `...` stands
    for.
    """
    lines = "\n".join(line.rstrip() for line in found.strip().splitlines())
    pattern = ".*".join(map(re.escape, shown.strip().split("...")))
    return re.fullmatch(pattern, lines, re.DOTALL) is not None


def run(page: Page) -> str | None:
    """Runs a page; what went wrong first, or None."""
    sys.path.insert(0, str(Path.cwd()))  # its files can be imported
    module = ModuleType(Path(page.path).stem)
    sys.modules[module.__name__] = module
    blocks = [*page.blocks, None]
    for block, after in zip(page.blocks, blocks[1:], strict=True):
        where = f"{page.path}:{block.line}"
        try:
            found = printed(page, block, module)
        except BaseException:
            return f"{where}: the program fails\n{traceback.format_exc()}"
        is_output = after is not None and after.language == "text" and found.strip()
        if is_output and after and not as_shown(found, after.text):
            return f"{where}: expected what the page shows below it, found\n{found}"
    return None


if __name__ == "__main__":
    wrong = run(Page(sys.argv[1]))
    if wrong:
        print(wrong, file=sys.stderr)
    sys.exit(wrong is not None)
