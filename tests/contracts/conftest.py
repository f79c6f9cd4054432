"""What stands beside these tests is found by its name, as it is when run as a command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
