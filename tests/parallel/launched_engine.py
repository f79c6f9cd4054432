"""One rank of the small model under a launcher: writes its answers into a folder.

``launched_engine.py FOLDER KEY=VALUE ...``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import small_engine

folder, keys = Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
given = {name: json.loads(value) for name, value in keys.items()}
with small_engine.start(executor="external_launcher", **given) as llm:
    answers = small_engine.answers(llm)
    (folder / os.environ["RANK"]).write_text(json.dumps(answers))
