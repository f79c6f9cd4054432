"""The Plugin suite: what discovery, loading, selection and validation may count on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import hardpoint
from attrs import NOTHING, fields, has
from hardpoint import discovery
from hardpoint.construction import LONGEST_PROBE_SECONDS
from hardpoint.errors import ConfigError
from hardpoint.hookspecs import hardpoint_executor, hardpoint_platform
from hardpoint.platform import Platform
from hardpoint.records import PlatformRecord, Verdict
from hardpoint.references import resolve
from hardpoint.registry import Registry

from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.fresh_process import ask, near_misses
from hardpoint_conformance.probe import Probe
from hardpoint_conformance.suite import Suite, not_applicable

HEAVY = frozenset(
    {
        "torch", "jax", "jaxlib", "tensorflow", "cupy", "triton", "numba", "numpy", "pycuda",
        "torch_xla", "onnxruntime", "transformers", "scipy",
    }
)  # fmt: skip
"""Array and device libraries: nothing before the worker's process may import one."""
HARMLESS = re.compile(r"/dev/(null|zero|full|u?random|tty|ptmx|pts/.*|shm/.*|fd/.*|std.*)$")


class PluginSuite(Suite):
    """Entry points, light import, versions, settings, verdict. For platforms and executors."""

    contract: ClassVar[str] = "plugin"
    kinds: ClassVar[tuple[str, ...]] = ("platform", "executor")

    # Who it is.

    def test_the_entry_point_leads_to_a_record_of_its_name(self) -> None:
        """The entry point's name is the configuration name."""
        plugin = self.subject.plugin
        expect_equal(
            plugin.record.name, plugin.name, "a record's name equals its entry point's",
            where=type(plugin.record),
            do="Give the record and the entry point in pyproject.toml one name.",
        )  # fmt: skip

    def test_only_one_distribution_claims_the_name(self) -> None:
        """Two distributions that claim one name are an error of the installation."""
        plugin = self.subject.plugin
        claims = [
            each.provider
            for each in Registry.discover().plugins
            if (each.kind, each.name) == (plugin.kind, plugin.name)
        ]
        expect_equal(
            len(claims), 1, f"one distribution provides {plugin.kind} {plugin.name!r}",
            where=discovery.judge, do=f"Uninstall all but one of {', '.join(claims)}.",
        )  # fmt: skip

    def test_the_record_offers_what_a_plugin_of_its_kind_offers(self) -> None:
        """References lead to what they say; each is light to read, heavy to resolve."""
        record = self.subject.plugin.record
        for name in ("platform", "executor", "settings"):
            reference = getattr(record, name, None)
            if reference is None:
                continue
            expect(
                isinstance(reference, str) and re.fullmatch(r"[\w.]+:[\w.]+", reference),
                "a record names classes by reference 'module:Class'", seen=reference,
                where=type(record), do=f"Write {name}='package.module:Class'.",
            )  # fmt: skip
        expect(
            record.summary, "a record has a summary for people", seen="it is empty",
            where=type(record), do="Set summary: `hardpoint plugins` shows it.",
        )  # fmt: skip

    def test_a_method_of_its_probe_is_one_that_is_asked(self) -> None:
        """One that is misspelt would never be called, and what it counts would stay unseen."""
        misspelt = near_misses(type(self.subject.probe), Probe)
        expect(
            not misspelt, "a method of a probe that is named nearly like one of the kit overrides "
            "it", seen=", ".join(misspelt), where=Probe,
            do="Correct the name, or choose one that cannot be taken for it.",
        )  # fmt: skip

    # Versions.

    def test_the_contract_number_is_one_that_this_core_serves(self) -> None:
        """Core N serves plugins for N and N-1."""
        api = self.subject.plugin.record.api
        core = hardpoint.API
        expect(
            api[0] == core[0] - 1 or (api[0] == core[0] and api[1] <= core[1]),
            f"a plugin is built for contract {core[0]}.x up to {core[0]}.{core[1]}, or "
            f"{core[0] - 1}.x",
            seen=api, where=discovery.check_api, do="Set record.api to what you tested against.",
        )  # fmt: skip

    def test_the_distribution_says_which_hardpoint_it_needs(self) -> None:
        """With a range that has this one in it and an end."""
        from packaging.requirements import Requirement

        own = re.compile(r"hardpoint(?![\w.-])", re.IGNORECASE)
        lines = [line for line in self.subject.plugin.requires if own.match(line)]
        expect(
            lines, "a plugin's distribution requires hardpoint",
            seen=f"Requires-Dist: {', '.join(self.subject.plugin.requires) or 'nothing'}",
            where=discovery.check_requirement, do="Add hardpoint>=0.1,<0.2 to dependencies.",
        )  # fmt: skip
        specifiers = [Requirement(line).specifier for line in lines]
        bounded = any(each.operator in ("<", "<=", "~=", "==") for s in specifiers for each in s)
        good = all(s.contains(hardpoint.__version__, prereleases=True) for s in specifiers)
        expect(
            bounded and good, "the range has this core in it, and an upper end", seen=lines,
            where=discovery.check_requirement,
            do=f"Require a range such as hardpoint>={hardpoint.__version__},<NEXT.",
        )  # fmt: skip

    # Lightness.

    def test_the_light_module_imports_hardpoint_and_the_standard_library(self) -> None:
        """Nothing else, and in any order relative to hardpoint, twice."""
        module = self._module()
        hook = hardpoint_platform if self.subject.kind == "platform" else hardpoint_executor
        answer = ask("imported_by", module)
        own = module.split(".")[0]
        foreign = sorted(set(answer["foreign"]) - {own, "__mp_main__"})
        named = [name for name in answer["named"] if name in foreign] or [own]
        expect(
            not foreign, "an entry point names a light module: it imports hardpoint and the "
            "standard library only", seen=f"{module} imports {', '.join(named)} (and so in all "
            f"{', '.join(foreign)})",
            where=hook, do="Name heavy classes by reference, and import them where they are used.",
        )  # fmt: skip
        expect(
            not answer["said"], "importing a plugin prints nothing and changes nothing",
            seen=answer["said"], where=hook, do="Keep plugin.py free of statements that act.",
        )  # fmt: skip

    def test_no_device_is_initialised_by_discovery_selection_and_validation(self) -> None:
        """In a fresh process: no array library, no device file, no thread, no child."""
        where = Platform.probe if self.subject.kind == "platform" else "hardpoint.registry"
        answer = ask("validated", *self._who())
        heavy = sorted(set(answer["modules"]) & HEAVY)
        expect(
            not heavy, "discovery, selection and validation import no array or device library",
            seen=f"imported: {', '.join(heavy)}", where=where,
            do="Look for a library with importlib.util.find_spec; import it in the worker.",
        )  # fmt: skip
        files = [path for path in answer["devices"] if not HARMLESS.match(path)]
        expect(
            not files and not answer["initialised"] and not answer["children"],
            "discovery, selection and validation initialise no device",
            seen=f"open: {files}; children: {answer['children']}; the probe says initialised: "
            f"{answer['initialised']}",
            where=where, do="Read what the system says of devices (files, a child process).",
        )  # fmt: skip
        expect(
            not answer["threads"] and not answer["environment"],
            "discovery, selection and validation start no thread and change no variable",
            seen=f"threads {answer['threads']}, variables {answer['environment']}", where=where,
            do="Return variables from Platform.environment; start threads in the worker.",
        )  # fmt: skip

    # The verdict.

    def test_the_verdict_is_pure(self) -> None:
        """The same twice over, and it changes nothing."""
        first, second = (self._verdict() for _ in range(2))
        expect_equal(
            first, second, "a probe looks and changes nothing: asked again it says the same",
            where=Platform.probe, do="Compute the verdict from what the machine says now.",
        )  # fmt: skip

    def test_the_verdict_says_why_and_names_its_devices(self) -> None:
        """One sentence for a person, whether it is usable or not."""
        verdict = self._verdict()
        expect(
            isinstance(verdict, Verdict) and verdict.reason.strip()
            and "\n" not in verdict.reason,
            "a verdict has a reason: one sentence for a person", seen=verdict, where=Verdict,
            do="Say what was found, or what is missing and how to get it.",
        )  # fmt: skip
        ids = [device.id for device in verdict.devices]
        expect(
            len(set(ids)) == len(ids), "each device of a verdict has an id of its own", seen=ids,
            where=Verdict, do="Use the ids by which the configuration names devices.",
        )  # fmt: skip

    def test_the_probe_ends_in_time(self) -> None:
        """In 200 ms; the machine may be busy, so the fastest of five counts."""
        seconds = min(ask("probe_seconds", *self._who())["seconds"])
        expect(
            seconds < LONGEST_PROBE_SECONDS / 5, "a probe ends in 200 ms",
            seen=f"{seconds * 1000:.0f} ms, the fastest of five", where=Platform.probe,
            do="Read less: a directory instead of a library.",
        )  # fmt: skip

    # Settings.

    def test_settings_are_a_frozen_record_whose_keys_have_defaults_and_help(self) -> None:
        """``plugins.NAME.KEY``."""
        reference = self.subject.plugin.record.settings
        if reference is None:
            not_applicable("it declares no settings")
        kind: Any = resolve(reference)
        frozen = has(kind) and getattr(kind.__setattr__, "__name__", "") == "_frozen_setattrs"
        expect(
            frozen, "settings are a frozen attrs class", seen=kind, where=PlatformRecord,
            do="Decorate the class with @frozen(kw_only=True).",
        )  # fmt: skip
        bare = [
            field.name
            for field in fields(kind)
            if field.default is NOTHING or not field.metadata.get("help")
        ]
        expect(
            not bare, "each key of the settings has a default and a help text",
            seen=f"without: {', '.join(bare)}", where="hardpoint.config.schema.key",
            do="Declare keys by hardpoint.config.schema.key(default, help).",
        )  # fmt: skip

    def test_an_unknown_key_of_its_settings_is_refused(self) -> None:
        """With the key's path."""
        key = f"plugins.{self.subject.name}.no_such_key"

        def load() -> object:
            config = self.subject.settled(**{key: 1})
            return Registry.discover(config).settings(self.subject.kind, self.subject.name)

        error = expect_raises(
            ConfigError, load, "a key that the settings do not declare is a ConfigError",
            where=PlatformRecord, do="Declare settings as an attrs class; accept no others.",
        )  # fmt: skip
        expect(
            "no_such_key" in str(error) or key.rpartition(".")[0] in str(error),
            "the error names the key", seen=str(error), where=ConfigError,
            do="Leave it to the registry.",
        )  # fmt: skip

    # Within.

    def _module(self) -> str:
        return self.subject.plugin.entry_point.partition(":")[0]

    def _who(self) -> tuple[str, str, Mapping[str, object]]:
        return self.subject.kind, self.subject.name, self.subject.settings

    def _verdict(self) -> Verdict:
        registry = Registry.discover(self.subject.settled())
        return registry.verdict(self.subject.kind, self.subject.name, named=True)
