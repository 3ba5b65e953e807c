"""The trainers of TRL with a configuration for DeepSpeed, at every stage; see ``trls.check``."""

import sys

from tests.interop import trls

trls.check(trls.runs(trls.KINDS, sys.argv[1], native=False))
