"""Split a file into parts small enough to carry; scripts whose ``--model`` takes the parts join them.

python bench/pack_model.py MODEL.gguf parts/ --parts 2
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

_PIECE = 1 << 20


def split(file: Path, folder: Path, parts: int) -> list[Path]:
    """Write ``file`` as ``parts`` files of nearly equal size into ``folder``; joined in order they are the file."""
    folder.mkdir(parents=True, exist_ok=True)
    size = file.stat().st_size
    borders = [size * part // parts for part in range(parts + 1)]
    made = [folder / f"{file.name}.part{part}" for part in range(parts)]
    with file.open("rb") as whole:
        for path, start, stop in zip(made, borders, borders[1:], strict=False):
            with path.open("wb") as part:
                for at in range(start, stop, _PIECE):
                    part.write(whole.read(min(_PIECE, stop - at)))
    return made


def join(parts: Sequence[Path], folder: Path) -> Path:
    """The file that ``parts`` are, made in ``folder``; one part is the file, or the folder of a model, itself."""
    if len(parts) == 1:
        return parts[0]
    joined = folder / "model.gguf"
    with joined.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", type=int, default=2)
    arguments = parser.parse_args()
    for path in split(arguments.file, arguments.folder, arguments.parts):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
