"""Is a TPU seen where there is one, and is it said why not where there is none?"""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hardpoint_tpu import detection
from hardpoint_tpu.detection import METADATA, Sighting, Surroundings, ask_metadata, look
from hardpoint_tpu.platform import LABEL, WITHOUT, TpuPlatform
from hardpoint_tpu.settings import TpuSettings


@pytest.fixture
def machine(tmp_path):
    """Write a machine with ``chips`` PCI functions and as many device files, and look at it."""

    def make(
        *, chips=4, files=None, device="0x0063", vendor="0x1ae0", vfio=True, environ=None,
        installed=("libtpu", "jax"), product="", metadata=lambda url: None,
    ) -> Surroundings:  # fmt: skip
        for index in range(chips):
            folder = tmp_path / f"sys/bus/pci/devices/0000:00:{index:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{device}\n")
        for index in range(chips if files is None else files):
            path = tmp_path / (f"dev/vfio/{index}" if vfio else f"dev/accel{index}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        dmi = tmp_path / "sys/class/dmi/id/product_name"
        dmi.parent.mkdir(parents=True)
        dmi.write_text(product)
        return Surroundings(
            root=tmp_path, environ=environ or {}, installed=installed.__contains__,
            metadata=metadata,
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("device", "vfio", "name"),
    [("0x0063", True, "TPU v5e"), ("0x005e", False, "TPU v4"), ("0x006f", True, "TPU v6e")],
)
def test_chips_are_seen(machine, device, vfio, name):
    assert look(machine(device=device, vfio=vfio)) == Sighting(chips=(name,) * 4)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"installed": ("jax",)}, "libtpu is not installed"),
        ({"environ": {"JAX_PLATFORMS": "cpu"}}, "JAX_PLATFORMS=cpu leaves TPUs out"),
        ({"chips": 0}, "no PCI function of a TPU"),
        ({"vendor": "0x10de"}, "no PCI function of a TPU"),
        ({"device": "0x0042"}, "no PCI function of a TPU"),
        ({"files": 0}, "no device file"),
        ({"environ": {"TPU_VISIBLE_CHIPS": ""}}, "TPU_VISIBLE_CHIPS= hides every chip"),
        ({"environ": {"TPU_VISIBLE_DEVICES": "9"}}, "TPU_VISIBLE_DEVICES=9 hides every chip"),
    ],
)
def test_each_reason_why_there_is_none_is_told(machine, what, reason):
    seen = look(machine(**what))
    assert seen.chips == ()
    assert reason in "; ".join(seen.reasons)


def test_a_device_file_that_may_not_be_opened_is_told(machine, monkeypatch):
    around = machine()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not be opened by this user" in "; ".join(look(around).reasons)


def test_the_environment_chooses_chips(machine):
    around = machine(environ={"TPU_VISIBLE_CHIPS": "0, 2"})
    assert look(around).chips == ("TPU v5e",) * 2


def test_every_reason_is_told_at_once(machine):
    seen = look(machine(chips=0, installed=(), environ={"JAX_PLATFORMS": "cpu"}))
    assert len(seen.reasons) == 3


def test_the_metadata_server_is_asked_on_googles_machines_alone(machine):
    asked = []

    def metadata(url):
        asked.append(url)
        return "v5litepod-4"

    assert look(machine(metadata=metadata)).accelerator_type is None
    assert asked == []


def test_the_metadata_server_names_the_accelerator(machine):
    around = machine(product="Google Compute Engine\n", metadata=lambda url: "v5litepod-4")
    assert look(around).accelerator_type == "v5litepod-4"


def test_an_accelerator_without_a_chip_is_told(machine):
    around = machine(product="Google Compute Engine", chips=0, metadata=lambda url: "v4-8")
    assert "yet the metadata server names v4-8" in look(around).reasons


def test_the_metadata_server_is_left_alone_where_the_environment_says_so(machine):
    around = machine(
        product="Google", environ={"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8"},
        metadata=lambda url: pytest.fail("asked"),
    )  # fmt: skip
    assert look(around).accelerator_type == "v4-8"


def test_no_answer_of_the_metadata_server_is_none():
    assert ask_metadata(METADATA.replace("169.254.169.254", "127.0.0.1:9")) is None


def test_the_metadata_server_is_asked_directly_and_in_its_own_words(monkeypatch):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"v5litepod-8\n")

        def log_message(self, *_):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = METADATA.replace("169.254.169.254", f"127.0.0.1:{server.server_port}")
        monkeypatch.setattr(detection, "PATIENCE", 20)
        assert ask_metadata(url) == "v5litepod-8"
    assert [(each.endswith("accelerator-type"), flavor) for each, flavor in seen] == [
        (True, "Google")
    ]


# The platform's verdict.


def platform(around=None, **settings) -> TpuPlatform:
    made = TpuPlatform(TpuSettings(**settings))
    made.surroundings = around
    return made


def test_chips_make_it_available_and_say_that_it_was_never_tried(machine):
    verdict = platform(machine(product="Google", metadata=lambda url: "v5e-4")).probe()
    assert verdict.available
    assert verdict.priority == 100
    assert verdict.reason == "4 chips (v5e-4); this plugin has never been run on a TPU"
    assert [device.id for device in verdict.devices] == ["0", "1", "2", "3"]


def test_without_a_chip_it_is_unavailable(machine):
    verdict = platform(machine(chips=0)).probe()
    assert not verdict.available
    assert verdict.reason == f"no PCI function of a TPU is there ({WITHOUT})"


def test_this_machine_has_none():
    verdict = platform().probe()
    assert not verdict.available
    assert "libtpu is not installed" in verdict.reason


def test_the_cpu_in_its_place_is_only_taken_by_name(machine):
    verdict = platform(machine(chips=0), backend="cpu").probe()
    assert verdict.available
    assert verdict.priority < 0
    assert verdict.reason == f"{LABEL}: plugins.tpu.backend = 'cpu'"


def test_without_jax_there_is_nothing(machine):
    verdict = platform(machine(installed=("libtpu",)), backend="cpu").probe()
    assert not verdict.available
    assert "jax is not installed" in verdict.reason
