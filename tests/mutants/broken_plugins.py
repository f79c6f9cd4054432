"""Light modules that are wrong in one way each. ORDINARY is the module of a sound platform."""

from __future__ import annotations

RECORD = "test_the_entry_point_leads_to_a_record_of_its_name"
OFFERS = "test_the_record_offers_what_a_plugin_of_its_kind_offers"
NUMBER = "test_the_contract_number_is_one_that_this_core_serves"
LIGHT = "test_the_light_module_imports_hardpoint_and_the_standard_library"
UNTOUCHED = "test_no_device_is_initialised_by_discovery_selection_and_validation"
SETTINGS = "test_settings_are_a_frozen_record_whose_keys_have_defaults_and_help"

PLATFORM = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord

@hookimpl
def hardpoint_platform():
    keys = {{
        "name": "NAME", "api": (2, 0), "platform": "mutant_platforms.MODULE:Mutant",
        "settings": "hardpoint_dummy.settings:DummySettings", "summary": "a mutant",
    }}
    return PlatformRecord(**{{**keys, {changes}}})
"""


def record(changes: str, before: str = "") -> str:
    """A light module whose record has ``changes``, after statements ``before``."""
    return before + PLATFORM.format(changes=changes)


MORE_ARGUMENTS = """ORDINARY

@hookimpl
def hardpoint_configure(config, device):
    return []
"""

MISSPELT = """ORDINARY

@hookimpl
def hardpoint_worker_start(worker):
    pass
"""

DICT = """
from hardpoint.hookspecs import hookimpl

@hookimpl
def hardpoint_platform():
    return {"name": "NAME"}
"""

WRITING = """ORDINARY

@hookimpl
def hardpoint_configure(config):
    object.__setattr__(config.scheduler, "max_num_seqs", 2)
    return []
"""

UNEXPLAINED = """ORDINARY

@hookimpl
def hardpoint_configure(config):
    return {"block_size": 8}
"""

VARIABLE = "import os\nos.environ['NAME'] = '1'\n"

THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
"""

OWN = "import hardpoint_dummy.platform\nORDINARY"

PLUGINS = {
    "twin-plugin": ("nothing", "ORDINARY"),
    "heavy-import": ("plugin.py imports an array library", "import numpy\nORDINARY", LIGHT),
    "imports-a-platform": ("plugin.py imports the platform's module", OWN, LIGHT),
    "misspelt-hook": ("a hook is misspelt", MISSPELT, RECORD),
    "more-arguments": ("a hook takes an argument that there is not", MORE_ARGUMENTS, RECORD),
    "api-too-new": ("record.api is newer than the core", record('"api": (3, 0)'), NUMBER),
    "api-too-old": ("record.api is older than is served", record('"api": (0, 9)'), NUMBER),
    "another-name": ("the record has another name", record('"name": "other"'), RECORD),
    "no-record": ("the hook returns a dict", DICT, RECORD),
    "no-summary": ("the record says nothing to people", record('"summary": ""'), OFFERS),
    "class-for-a-reference": (
        "the record has the platform class itself", record('"platform": object'), OFFERS,
    ),
    "environment-at-import": (
        "plugin.py sets a variable when it is imported", record("", VARIABLE), LIGHT,
    ),
    "thread-at-import": (
        "plugin.py starts a thread when it is imported", record("", THREAD), UNTOUCHED,
    ),
    "child-at-import": (
        "plugin.py starts a process when it is imported", record("", CHILD), UNTOUCHED,
    ),
    "mutable-settings": (
        "the settings can be changed", record('"settings": "mutant_settings:Mutable"'), SETTINGS,
    ),
    "settings-without-help": (
        "a key has no help", record('"settings": "mutant_settings:Silent"'), SETTINGS,
    ),
    "configure-writes": (
        "hardpoint_configure writes into the configuration that it is given", WRITING, UNTOUCHED,
    ),
    "unexplained-change": (
        "hardpoint_configure returns a plain dict of changes", UNEXPLAINED, UNTOUCHED,
    ),
}  # fmt: skip
