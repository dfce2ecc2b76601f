"""Execute notebooks as they are committed: from the top, in notebooks/, outputs kept, no noise.

python tests/run_notebook.py notebooks/04_fsdp.ipynb ...      executes in place
python tests/run_notebook.py draft.py notebooks/04_fsdp.ipynb  from a percent script (needs jupytext)
"""

import pathlib
import sys
import time

import nbformat
from nbclient import NotebookClient


def clean(notebook: nbformat.NotebookNode) -> None:
    """Keep what a reader sees; drop what changes from run to run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter")}
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
        if "solution" in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = {"source_hidden": True}


def merged(outputs: list) -> list:
    """A stream cut at the moments of its arrival becomes one again. A picture is kept once: as PNG, not in HTML too."""
    whole = []
    for output in outputs:
        if "image/png" in output.get("data", {}):
            output.data.pop("text/html", None)
        last = whole[-1] if whole else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            whole.append(output)
    return whole


def run(source: pathlib.Path, target: pathlib.Path) -> float:
    """Execute `source` into `target`, both paths; return the seconds it took. An error in a cell raises."""
    if source.suffix == ".py":
        import jupytext

        notebook = jupytext.read(source)
    else:
        notebook = nbformat.read(source, as_version=4)
    clean(notebook)
    began = time.monotonic()
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(target.parent)}}
    )
    client.execute()
    seconds = time.monotonic() - began
    clean(notebook)
    _, notebook = nbformat.validator.normalize(notebook)
    nbformat.write(notebook, target)
    return seconds


def main(arguments: list[str]) -> None:
    paths = [pathlib.Path(a) for a in arguments]
    if not paths or paths[-1].suffix != ".ipynb":
        sys.exit(__doc__)
    pairs = [(paths[0], paths[1])] if paths[0].suffix == ".py" else [(p, p) for p in paths]
    for source, target in pairs:
        seconds = run(source, target)
        print(f"{target}: {seconds:.1f} s, {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
