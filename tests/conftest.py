"""Commands that tests start (torchrun above all) are those of the interpreter that runs the tests."""

import os
import sys
from pathlib import Path

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
