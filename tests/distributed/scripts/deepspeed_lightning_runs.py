"""Lightning's own strategies for DeepSpeed, and DDP beside; see ``own_strategies``."""

import sys
from pathlib import Path

from tests.interop import own_strategies

own_strategies.save(Path(sys.argv[1]))
