"""python -m tools.pictures [NAME...]: make the pictures of the README, all of them or those named.

terminal    a training that is killed with -9 and goes on, recorded from a real terminal
hero        what a save costs, from the figures in bench/results
report      what `holdfast report` makes of a run that was killed, stopped and resumed
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.pictures import hero, report, story

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
_MAKERS = {"terminal": story.make, "hero": hero.make, "report": report.make}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in _MAKERS]
    if unknown:
        print(f"{', '.join(unknown)}: no such picture. Valid: {', '.join(_MAKERS)}")
        return 2
    for name in names or list(_MAKERS):
        for path in _MAKERS[name](ROOT, PICTURES):
            print(f"{path.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
