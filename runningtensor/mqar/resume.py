"""What a run that was stopped goes on from: a file that is whole or not there, about 12 bytes a parameter."""

import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

FORMAT = 2  # to be raised when what is in the file, or what it means, changes
NOTE = "NOTE "  # begins a line that a person should see


def save(path: Path, of: str, state: dict[str, Any]) -> None:
    """`of` is what must be the same when it is loaded. All or nothing, whenever the process is killed."""
    content = io.BytesIO()
    torch.save(state | {"format": FORMAT, "of": of}, content)
    written = None
    try:
        # A name of its own: the same run may be under way in another sweep.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", delete=False) as file:
            written = Path(file.name)
            file.write(content.getbuffer())
        os.replace(written, path)
    except (
        OSError
    ) as error:  # the disk is full, or the folder is another machine's: the run is worth more than its file
        print(f"{NOTE}{path} cannot be written: {error}", flush=True)
        if written:
            written.unlink(missing_ok=True)


def load(path: Path, of: str) -> dict[str, Any] | None:
    """None: there is nothing to go on from."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch does not look at the sums it writes
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not damaged and (state["format"], state["of"]) == (FORMAT, of):
            return state
        why = "it is damaged" if damaged else "it is of another run, machine or version"
    except Exception as error:  # whatever is in the file, the run can begin anew
        why = f"it cannot be read, {type(error).__name__}"
    print(f"{NOTE}{path} is ignored, and its run begins anew: {why}", flush=True)
    return None


def forget(path: Path) -> None:
    """And what is left of it, if a process was killed while it wrote."""
    for file in path.parent.glob(f"{path.stem}.*"):
        file.unlink(missing_ok=True)
