"""Fetch and convert the default model once; a second run finds it and does nothing."""

import argparse
import sys
from pathlib import Path

from serving.engine.errors import ModelError
from serving.engine.fetch import DEFAULT_MODEL, KNOWN_MODELS, default_cache_dir, resolve_model


def main() -> int:
    """Fetch, print the folder, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, choices=sorted(KNOWN_MODELS))
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        folder = resolve_model(arguments.model, arguments.cache_dir, show_progress=True)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
