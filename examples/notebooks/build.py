"""Makes the notebooks of the scripts of examples/, runs them, and saves what they print.

    python -m normpass.examples.notebooks.build [NAME ...] [--source]

A script is the one source: its docstring is the first cell, jupytext takes the others from the
marks `# %%`, and the last one calls main with arguments that a notebook has the time for. What was
run of a notebook holds no times and no paths, so that running it again changes numbers at most.
Needs what the extras `test` and `examples` install.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).parent
SCRIPTS = {path.stem: path for path in sorted(FOLDER.parent.glob("[!_]*.py"))}
# For a minute at most on two cores.
ARGUMENTS: Mapping[str, Sequence[str]] = {
    "burgers_pinn": ("--steps", "101"),
    "custom_norm": ("--steps", "61"),
    "gpt2_curvature": ("--steps", "10"),
    "maml": ("--steps", "31"),
    "matgl_forces": ("--atoms", "8", "--steps", "21"),
    "operator_rule": (),
    "per_sample_gradients": ("--steps", "61"),
    "train_decoder": (),
    "train_unet": ("--steps", "151"),
    "train_vit": ("--steps", "151"),
    "wgan_gp": ("--steps", "51"),
}
LAST = 'if __name__ == "__main__":\n    main()'
ACCEPT = "make notebooks"


def path_of(name: str) -> Path:
    """Where the notebook of a script lies."""
    return FOLDER / f"{name}.ipynb"


def introduction(script: str) -> str:
    """A script's docstring as Markdown: its first sentence is the title."""
    text = ast.get_docstring(ast.parse(script))
    if text is None:
        raise ValueError("expected a docstring at the top of the script, found none")
    title, _, rest = text.partition("\n")
    return f"# {title.removesuffix('.')}\n{rest}"


def notebook(name: str) -> Any:
    """The notebook of a script, not run.

    Raises ValueError for a script without a docstring, or whose last cell does not call main.
    """
    import jupytext
    from nbformat.v4 import new_markdown_cell

    script = SCRIPTS[name].read_text("utf-8")
    made = jupytext.reads(script, fmt="py:percent")
    first, *cells = made.cells
    if not cells or cells[-1].source != LAST:
        raise ValueError(f"{name}: expected {LAST!r} in a cell of its own, the last one")
    cells[-1].source = f"main({list(ARGUMENTS[name])})".replace("'", '"')
    made.cells = [new_markdown_cell(introduction(first.source)), *cells]
    for i, cell in enumerate(made.cells):
        cell.id = f"cell-{i}"  # and not one that is drawn anew each time
        cell.metadata = {}
    made.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return made


def sources(made: Any) -> list[tuple[str, str]]:
    """The cells of a notebook: what each is, and its text."""
    return [(cell.cell_type, cell.source) for cell in made.cells]


def executed(made: Any, timeout: int = 1800) -> Any:
    """The notebook with what it prints. timeout: of a cell, in seconds.

    Raises nbclient.exceptions.CellExecutionError where a cell does.
    """
    from nbclient import NotebookClient

    client = NotebookClient(made, timeout=timeout, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(FOLDER))
    made.metadata["language_info"] = {"name": "python"}
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.metadata = {}
            cell.outputs = [tidied(output) for output in joined(cell.outputs)]
    return made


def joined(outputs: Sequence[Any]) -> list[Any]:
    """What was printed in one piece, however many it arrived in; what went to stderr, such as
    warnings with the paths of a machine, is left out.
    """
    found: list[Any] = []
    for output in outputs:
        printed = output.get("name") == "stdout"
        if printed and found and found[-1].get("name") == "stdout":
            found[-1].text += output.text
        elif printed or output.output_type != "stream":
            found.append(output)
    return found


def tidied(output: Any) -> Any:
    """An output without the number that its line had in this run.

    Raises ValueError for a path of this machine in it.
    """
    if "execution_count" in output:
        output.execution_count = None
    found = re.search(r"(?<![\w.:/])/(?:\w[\w.-]*/){2,}", str(output))
    if found:
        raise ValueError(f"expected no absolute path in an output, found {found[0]!r}")
    return output


def read(name: str) -> Any:
    """The notebook that lies in the folder."""
    import nbformat

    return nbformat.read(path_of(name), as_version=4)


def main(argv: Sequence[str] | None = None) -> None:
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of scripts; all, if none is named"
    )
    parser.add_argument("--source", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(SCRIPTS))
    if unknown:
        parser.error(f"expected names of {', '.join(SCRIPTS)}; found {', '.join(unknown)}")
    for name in options.names or SCRIPTS:
        made = notebook(name)
        if not options.source:
            made = executed(made)
        nbformat.write(made, path_of(name))
        print(path_of(name).relative_to(FOLDER.parents[1]))


if __name__ == "__main__":
    main()
