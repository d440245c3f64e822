"""Put a trained model into the package, in bfloat16, with its card.

python -m recipes.ship runs/sudoku/settle/model sudoku --card recipes/sudoku/CARD.md
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from dgemma.loading import load

MODELS = Path("src/dgemma/data/models")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="the directory that `dgemma train` wrote")
    parser.add_argument("name", help="bundled:NAME will mean it")
    parser.add_argument("--card", type=Path, required=True, help="its model card")
    args = parser.parse_args()
    target = MODELS / args.name
    made = target.with_name(f"{args.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    load(args.model, dtype="bfloat16").save(made)
    shutil.copy(args.card, made / "README.md")
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    for file in sorted(target.iterdir()):
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
