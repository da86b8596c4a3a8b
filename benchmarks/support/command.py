"""The command `alignedserve` of this environment."""

import sys
from pathlib import Path

ALIGNEDSERVE = str(Path(sys.executable).with_name("alignedserve"))
