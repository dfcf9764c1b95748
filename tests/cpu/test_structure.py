"""``scripts/structure.py`` on this tree, and on a small one in which there is something to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "structure.py"

FILES = {
    "__init__.py": '"""Names."""\n',
    "low/__init__.py": "",
    "low/words.py": '"""One\ntwo."""\n\nfrom typing import Any\n\nx: Any = 1  # why\n# a note\n',
    "low/climbs.py": "def f(zero_padding):\n    import tiny.high.top\n",
    "high/__init__.py": "",
    "high/top.py": "from tiny.high import left\nfrom tiny.low.words import x\n",
    "high/left.py": "import importlib\nright = importlib.import_module('tiny.high.right')\n",
    "high/right.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
    "    from tiny.high.left import right\n",
    "cuda/copy.cu": "int do_zero_padding; // zero\n",
    "cuda/none.cuh": "// zero_padding\n",
}


def structure(*arguments: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def below(lines: list[str], head: str) -> list[str]:
    """The indented lines under a line."""
    found = []
    for line in lines[lines.index(head) + 1 :]:
        if not line.startswith("  "):
            break
        found.append(line.strip())
    return found


def test_a_circle_an_upward_import_and_a_name_are_found(tmp_path):
    package = tmp_path / "tiny"
    for name, text in FILES.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lines = structure(package, "--order", "low,high,__init__", "--names", "zero_padding")
    rows = {row[0]: [int(word) for word in row[1:]] for line in lines[1:6] if (row := line.split())}
    assert lines[0].split() == ["room", "files", "Python", "code", "docstrings", "CUDA", "Any"]
    assert rows["low"] == [3, 9, 4, 2, 0, 1]
    assert rows["cuda"] == [2, 0, 0, 0, 2, 0]
    assert rows["all"][0] == len(FILES)
    assert below(lines, "circles of files: 1") == ["high/left.py, high/right.py"]
    assert below(lines, "circles of rooms: 1") == ["high, low"]
    assert below(lines, "upward imports: 1") == ["low/climbs.py -> high/top.py"]
    # words, the circle of left and right, top, climbs
    assert "layers of files: 3" in lines
    assert below(lines, "files that name zero_padding: 2") == ["cuda/copy.cu", "low/climbs.py"]
    assert structure(package, "--order", "high,low")[-1] != lines[-1]
    turned = structure(package, "--order", "high,low")
    assert below(turned, "upward imports: 1") == ["high/top.py -> low/words.py"]
    assert "rooms that the order leaves out: __init__" in turned


def test_this_tree_has_its_rooms_and_all_of_them_stand_in_the_order():
    lines = structure("--names", "zero_padding")
    rooms = [line.split()[0] for line in lines[1 : lines.index("")]]
    for room in ("api", "bench", "cli", "cuda", "engines", "jit", "memory", "ranks", "reference"):
        assert room in rooms
    assert not [line for line in lines if line.startswith("rooms that the order leaves out")]
    assert len(below(lines, next(line for line in lines if "name zero_padding" in line))) > 3


def test_this_tree_has_no_circles_and_no_upward_imports():
    lines = structure()
    for head in ("circles of rooms: 0", "circles of files: 0", "upward imports: 0"):
        assert head in lines
