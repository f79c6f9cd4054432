from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys

import pytest
from hardpoint.checkpoints import read_description
from hardpoint.errors import CheckpointError, UnsupportedModelError

CANARY = "from pathlib import Path\nPath(__file__).with_name('FIRED').touch()\n"


def test_folder_and_gguf_describe_the_same_model_alike(tmp_path, make):
    (tmp_path / "m.gguf").write_bytes(make.llama_gguf())
    packed = read_description(str(tmp_path / "m.gguf"))
    folder = read_description(str(make.folder(tmp_path / "hf", kind="F32")))
    for name in (
        "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads",
        "num_kv_heads", "head_size", "vocab_size", "context_length", "stored_dtype",
        "bos_token_id", "eos_token_ids",
    ):  # fmt: skip
        assert getattr(packed, name) == getattr(folder, name), name
    assert (packed.format, folder.format) == ("gguf", "safetensors")
    assert packed.stored_dtype == "float32"
    for key in ("rope_theta", "tie_word_embeddings", "attention_bias", "hidden_act"):
        assert packed.hf_config[key] == folder.hf_config[key], key
    assert packed.hf_config["rms_norm_eps"] == pytest.approx(folder.hf_config["rms_norm_eps"])
    assert pickle.loads(pickle.dumps(packed)) == packed


def test_stored_dtype_is_what_the_files_hold(tmp_path, make):
    folder = make.folder(tmp_path / "m", {"torch_dtype": "float32"}, kind="BF16")
    assert read_description(folder).stored_dtype == "bfloat16"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path, make):
    (tmp_path / "m.gguf").write_bytes(make.llama_gguf())
    assert read_description(tmp_path).path == tmp_path / "m.gguf"
    (tmp_path / "n.gguf").write_bytes(make.llama_gguf())
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(m.gguf, n.gguf\)"):
        read_description(tmp_path)


def test_the_tokens_that_end_come_from_the_generation_config(tmp_path, make):
    folder = make.folder(tmp_path / "m")
    assert read_description(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    assert read_description(folder).eos_token_ids == (5, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": 96}')
    with pytest.raises(CheckpointError, match=r"eos_token_id is 96.* from 0 to 95"):
        read_description(folder)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7}},
            7,
            None,
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            10000.0,
            {"type": "linear", "factor": 2.0, "rope_type": "linear"},
        ),
    ],
)
def test_old_and_new_spellings_of_rotary_settings(tmp_path, make, config, theta, scaling):
    found = read_description(make.folder(tmp_path / "m", config)).hf_config
    assert (found["rope_theta"], found["rope_scaling"]) == (theta, scaling)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number from 1"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "3 layers, but there are only 20 tensors"),
        ({"num_hidden_layers": 1000}, "1000 layers, but there are only 20 tensors"),
        ({"vocab_size": 1 << 27}, r"'model.embed_tokens.weight' has shape \[96, 32\], but"),
        ({"intermediate_size": 1 << 20}, r"gate_proj.weight' has shape \[64, 32\], but the conf"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "multiple of 5 attention heads"),
        ({"tie_word_embeddings": False}, r"missing: lm_head\.weight"),
        ({"tie_word_embeddings": "no"}, "true or false"),
        ({"rope_theta": -1}, "rope_theta is -1; it must be a number greater than 0"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": 5}, "rope_scaling is 5; it must be a table"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"partial_rotary_factor": 0.5}, "rotated in part"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": "Llama"}, "architectures"),
        ({"architectures": ["os:system"]}, "architectures"),
        ({"architectures": ["../evil"]}, "architectures"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_a_config_that_cannot_be_is_refused_before_anything_is_started(
    tmp_path, make, config, message
):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_description(make.folder(tmp_path / "m", config))
    assert str(tmp_path / "m") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_architecture_whose_files_cannot_hold_it(tmp_path, make):
    huge = {"architectures": ["AcmeForCausalLM"], "vocab_size": 1 << 27}
    with pytest.raises(CheckpointError, match="they do not belong together"):
        read_description(make.folder(tmp_path / "m", huge))
    small = {"architectures": ["AcmeForCausalLM"]}
    assert read_description(make.folder(tmp_path / "n", small)).architecture == "AcmeForCausalLM"


def test_an_architecture_of_another_kind_lists_what_is_supported(tmp_path, make):
    folder = make.folder(tmp_path / "m")
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "vocab_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel .*supported: LlamaForCau"):
        read_description(folder)


def gguf_error(tmp_path, make, *, change=(), drop=(), tensors=None, error=CheckpointError):
    keys = [row for row in make.llama_keys() if row[0] not in drop]
    keys = [row for row in keys if row[0] not in {name for name, *_ in change}]
    raw = make.gguf([*keys, *change], make.llama_tensors() if tensors is None else tensors)
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(error) as caught:
        read_description(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [
        (
            ("general.architecture", 8, "mamba"),
            "'mamba' is not supported in GGUF files; supported: gemma, ",
            UnsupportedModelError,
        ),
        (("llama.expert_count", 4, 8), "belong to no MixtralFor", UnsupportedModelError),
        (("split.count", 4, 2), "split over several files", UnsupportedModelError),
        (("llama.rope.dimension_count", 4, 4), "another size", UnsupportedModelError),
        (("llama.attention.value_length", 4, 16), "another size", UnsupportedModelError),
        (("llama.attention.head_count_kv", 9, (4, [1, 2])), "differs", UnsupportedModelError),
        (("llama.attention.head_count_kv", 4, 3), "divisor of the 4", CheckpointError),
        (("llama.attention.head_count", 4, 0), "head_count is 0", CheckpointError),
        (("llama.attention.head_count", 8, "4"), "head_count is '4'", CheckpointError),
        (("llama.block_count", 4, 5), "5 layers, but there are only 20", CheckpointError),
        (("llama.block_count", 4, 1 << 31), "block_count", CheckpointError),
        (("llama.vocab_size", 4, 95), "vocab_size is 95; it must be 96", CheckpointError),
        (("llama.feed_forward_length", 4, 32), "gate_proj.weight' has shape", CheckpointError),
        (("llama.rope.freq_base", 6, float("nan")), "freq_base is nan", CheckpointError),
        (("tokenizer.ggml.eos_token_id", 4, 96), "eos_token_id is 96", CheckpointError),
    ],
)
def test_gguf_metadata_that_cannot_be_is_refused(tmp_path, make, change, message, error):
    assert message in gguf_error(tmp_path, make, change=[change], error=error)


def test_a_gguf_window_is_refused_where_the_architecture_has_none(tmp_path, make):
    change = [("general.architecture", 8, "qwen2"), ("qwen2.attention.sliding_window", 4, 9)]
    text = gguf_error(tmp_path, make, change=change, error=UnsupportedModelError)
    assert "qwen2.attention.sliding_window says a window in layers" in text


def test_gguf_metadata_that_is_missing_is_named(tmp_path, make):
    text = gguf_error(tmp_path, make, drop=["llama.context_length"])
    assert "llama.context_length is None" in text


def test_gguf_tensors_must_be_those_of_the_model(tmp_path, make):
    tensors = make.llama_tensors()
    norm = tensors.pop("blk.1.ffn_norm.weight")
    assert "missing: model.layers.1.post_attention_layernorm.weight" in gguf_error(
        tmp_path, make, tensors=tensors
    )
    tensors["blk.1.ffn_norm.weight"] = norm
    extra = {**tensors, "blk.1.ffn_gate_inp.weight": norm}
    assert "belong to no LlamaForCausalLM: blk.1.ffn_gate_inp.weight" in gguf_error(
        tmp_path, make, tensors=extra, error=UnsupportedModelError
    )
    twins = {**tensors, "blk.01.ffn_norm.weight": norm}
    assert "two tensors stand for the same weight" in gguf_error(tmp_path, make, tensors=twins)
    frequencies = {**tensors, "rope_freqs.weight": norm}
    assert "rotary factors are read as [4] of F32" in gguf_error(
        tmp_path, make, tensors=frequencies, error=UnsupportedModelError
    )
    frequencies = {**tensors, "rope_freqs.weight": ((4,), 0, struct.pack("<4f", 1, 2, 3, 4))}
    assert "are not those of Llama 3" in gguf_error(
        tmp_path, make, tensors=frequencies, error=UnsupportedModelError
    )
    del tensors["token_embd.weight"]
    assert "'token_embd.weight' is missing" in gguf_error(tmp_path, make, tensors=tensors)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((0, 0, 0, 0), "cannot be rotary factors"),
        ((1, -1, 1, 1), "cannot be rotary factors"),
        ((1, float("nan"), 1, 1), "cannot be rotary factors"),
        ((1, float("inf"), 1, 1), "cannot be rotary factors"),
    ],
)
def test_impossible_rotary_factors_are_refused(tmp_path, make, factors, message):
    row = ((4,), 0, struct.pack("<4f", *factors))
    tensors = {**make.llama_tensors(), "rope_freqs.weight": row}
    assert message in gguf_error(tmp_path, make, tensors=tensors)


def test_rotary_factors_of_one_are_none(tmp_path, make):
    (tmp_path / "m.gguf").write_bytes(make.factors_gguf())
    scaling = read_description(tmp_path / "m.gguf").hf_config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 1.0)


def test_a_stack_of_experts_is_one_of_matrices(tmp_path, make):
    raw = make.mixture_gguf()
    (tmp_path / "m.gguf").write_bytes(raw)
    found = read_description(tmp_path / "m.gguf")
    assert found.architecture == "Qwen3MoeForCausalLM"
    assert found.hf_config["num_experts_per_tok"] == 2
    name = b"blk.0.ffn_gate_exps.weight" + struct.pack("<I3Q", 3, 32, 16, 4)
    assert name in raw
    other = b"blk.0.ffn_gate_exps.weight" + struct.pack("<I3Q", 3, 32, 4, 16)
    (tmp_path / "m.gguf").write_bytes(raw.replace(name, other))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' has shape \[4, 32\]"):
        read_description(tmp_path / "m.gguf")
    flat = b"blk.0.ffn_gate_exps.weight" + struct.pack("<I3Q", 3, 1, 1, 2048)
    (tmp_path / "m.gguf").write_bytes(raw.replace(name, flat))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' has shape \[1, 1\]"):
        read_description(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("model", "load_format", "message"),
    [
        ("org/name", "auto", "hf download org/name"),
        ("/no/such/model", "auto", "there is no such file or folder"),
        ("dummy", "auto", "set load_format to dummy"),
        ("dummy", "pickle", "load_format 'pickle' is unknown"),
        ("other", "dummy", "there is no such file or folder"),
    ],
)
def test_models_that_are_not_there(tmp_path, monkeypatch, model, load_format, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_description(model, load_format)


@pytest.mark.parametrize("load_format", ["auto", "gguf", "dummy"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("x" * 10_000, "File name too long"),
        ("/proc/self/mem", "/proc/self/mem'?: (cannot be read: Input/output|the file is empty)"),
        ("~nobody-of-that-name/model", "home directory"),
    ],
    ids=["long", "unreadable", "homeless"],
)
def test_a_path_that_the_system_refuses_is_named(model, load_format, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_description(model, load_format)
    assert len(str(caught.value)) < 400


def test_a_directory_without_a_config_says_what_a_model_is(tmp_path, make):
    with pytest.raises(CheckpointError, match=r"no config\.json in the folder; a model is"):
        read_description(tmp_path)
    (tmp_path / "m.txt").write_text("{}")
    with pytest.raises(CheckpointError, match="not a GGUF file; a safetensors model is given as"):
        read_description(tmp_path / "m.txt")
    with pytest.raises(CheckpointError, match="no GGUF file in the folder"):
        read_description(make.folder(tmp_path / "m"), "gguf")


def test_dummy_needs_no_weights_and_no_files(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = read_description("dummy", "dummy")
    assert (tiny.format, tiny.vocab_size, tiny.eos_token_ids) == ("dummy", 256, ())
    folder = make.folder(tmp_path / "m", {"num_hidden_layers": 7})
    (folder / "model.safetensors").unlink()
    assert read_description(folder, "dummy").num_layers == 7
    assert read_description(folder, "dummy").format == "dummy"
    (tmp_path / "m.gguf").write_bytes(make.llama_gguf())
    assert read_description(tmp_path / "m.gguf", "dummy").format == "dummy"


@pytest.fixture
def booby_trapped(tmp_path, make):
    """A folder that tries every way to have its own code run."""
    folder = make.folder(
        tmp_path / "trap",
        {
            "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
            "trust_remote_code": True,
            "custom_pipelines": {"x": {"impl": "evil.Pipeline"}},
        },
    )
    for name in ("evil", "modeling_llama", "configuration_llama", "conftest", "__init__"):
        (folder / f"{name}.py").write_text(CANARY)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    )
    command = f"touch {folder / 'FIRED'}"
    pickled = b"cos\nsystem\n(S'" + command.encode() + b"'\ntR."
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "scheduler.pkl"):
        (folder / name).write_bytes(pickled)
    return folder


def test_code_in_a_model_folder_is_never_run_nor_passed_on(booby_trapped):
    script = (
        "import sys\n"
        "from hardpoint.checkpoints import read_description\n"
        "found = read_description(sys.argv[1])\n"
        "assert_free = [key for key in found.hf_config if 'auto' in key or 'custom' in key"
        " or 'trust' in key]\n"
        "print(found.architecture, assert_free, 'evil' in sys.modules, 'pickle' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(booby_trapped)],
        capture_output=True, text=True, check=True, cwd=booby_trapped.parent,
    )  # fmt: skip
    assert done.stdout.split() == ["LlamaForCausalLM", "[]", "False", "False"]
    assert not (booby_trapped / "FIRED").exists()


def test_without_safe_weights_the_trap_is_refused(booby_trapped):
    (booby_trapped / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is never read: convert it to safetensors"):
        read_description(booby_trapped)
    assert not (booby_trapped / "FIRED").exists()


def test_the_traps_would_fire_if_they_were_loaded(booby_trapped):
    """The control: these canaries are live."""
    subprocess.run([sys.executable, str(booby_trapped / "evil.py")], check=True)
    assert (booby_trapped / "FIRED").exists()
    (booby_trapped / "FIRED").unlink()
    pickle.loads((booby_trapped / "pytorch_model.bin").read_bytes())
    assert (booby_trapped / "FIRED").exists()
