"""The bundled pair: a small trained target and its DFlash2 drafter.

`python -m specpilot_rs.demo` shows them at work.
"""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
"""Checkpoint of the bundled target."""
DFLASH2_DIR = Path(__file__).parent / "dflash2"
"""Checkpoint of the bundled drafter."""
