from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from syringa.errors import ModelError
from syringa.modelfiles import can_pull
from syringa.modelfiles import locate as locate_model
from syringa.modelfiles.locate import DEFAULT_MODEL, DEFAULT_MODEL_FILE, default_path, hub_name, known_models

from .gguf_builder import TENSORS, gguf, llama


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("SYRINGA_HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return home


REAL = default_path()  # as installed for the tests


@pytest.fixture
def pulled(empty_home: Path) -> Path:
    """The path of the default model in a home where it was pulled."""
    assert REAL is not None, "run `syringa pull`"
    path = empty_home / "models" / DEFAULT_MODEL_FILE
    path.parent.mkdir(parents=True)
    path.symlink_to(REAL)
    return path


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "default", "smollm2", "SMOLLM2"])
@pytest.mark.usefixtures("pulled")
def test_locate_default_model_by_any_name(name: str) -> None:
    files = locate_model(name)
    assert files.name == DEFAULT_MODEL
    assert files.kind == "gguf"
    assert files.path.endswith(DEFAULT_MODEL_FILE)


@pytest.mark.usefixtures("no_wheel")
def test_locate_pulled_default_model(empty_home: Path) -> None:
    with pytest.raises(ModelError, match="run `syringa pull`"):
        locate_model("default")
    (empty_home / "models").mkdir(parents=True)
    (empty_home / "models" / DEFAULT_MODEL_FILE).write_bytes(gguf(llama(), TENSORS))
    assert locate_model("default").path == str(empty_home / "models" / DEFAULT_MODEL_FILE)


def test_locate_paths(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf(llama(), TENSORS))
    assert (locate_model(str(file)).name, locate_model(str(file)).kind) == ("tiny", "gguf")
    folder = make_folder(tmp_path / "My-Model")
    assert (locate_model(str(folder)).name, locate_model(str(folder)).kind) == ("My-Model", "folder")
    only = tmp_path / "only"
    only.mkdir()
    (only / "a.gguf").write_bytes(gguf(llama(), TENSORS))
    assert locate_model(str(only)).path == str(only / "a.gguf")


def test_locate_hub_snapshot(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="run `syringa pull org/name`"):
        locate_model("org/name")
    repository = tmp_path / "hub" / "models--org--name"
    folder = make_folder(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    files = locate_model("org/name")
    assert (files.name, files.path, files.kind) == ("org/name", str(folder), "folder")
    assert [model.name for model in known_models()] == [DEFAULT_MODEL, "org/name"]


@pytest.mark.parametrize(
    ("name", "closest"),
    [("qwen3-5b", "qwen3-"), ("Qwen3-4B-Instruct", "qwen3-4b"), ("lama-3.2-3b", "llama-3.2-3b")],
)
def test_unknown_name_gets_the_closest_one(name: str, closest: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate_model(name)
    assert caught.value.message.startswith(
        f"{name}: no such file or folder, and no model has this name: did you mean {closest}"
    )
    assert "`syringa models --available` lists the models that can be pulled" in caught.value.message


@pytest.mark.parametrize("name", ["./m.gguf", "qwen3.gguf", "/no/such/folder", "~/m"])
def test_missing_path_gets_no_other_name(name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: no such file or folder; `syringa models` lists the models that"):
        locate_model(name)


def test_name_that_is_like_no_other_gets_the_list() -> None:
    with pytest.raises(ModelError, match="and no model has this name; `syringa models --available` lists the models"):
        locate_model("zzzzzzzz")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("hf.co/org/x-GGUF:Q4_K_M", "org/x-GGUF:Q4_K_M"),
        ("https://huggingface.co/org/x", "org/x"),
        ("https://huggingface.co/org/x/", "org/x"),
        ("https://huggingface.co/org/x/tree/main", "org/x"),
        ("https://www.huggingface.co/org/x/blob/main/q/x.gguf", "org/x:q/x.gguf"),
        ("http://hf.co/org/x/resolve/main/x.gguf?download=true", "org/x:x.gguf"),
        ("HuggingFace.co/org/x:latest", "org/x"),
        ("qwen3:4b", "Qwen/Qwen3-4B-GGUF:Q4_K_M"),
    ],
)
def test_name_on_the_hub_of_an_address(model: str, name: str) -> None:
    assert str(hub_name(model)) == name
    assert can_pull(model)
    with pytest.raises(ModelError, match="and no copy in the Hugging Face cache: run `syringa pull "):
        locate_model(model)


@pytest.mark.parametrize("model", ["https://huggingface.co/org", "https://huggingface.co/org/x/tree/dev", "hf.co/"])
def test_other_addresses_name_no_model(model: str) -> None:
    assert not can_pull(model)


def test_model_of_an_address_has_the_name_on_the_hub(tmp_path: Path) -> None:
    make_folder(tmp_path / "hub" / "models--org--name" / "snapshots" / "abc")
    assert locate_model("https://huggingface.co/org/name").name == "org/name"


def test_model_of_the_catalog_has_its_name_there(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-4B-GGUF" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "Qwen3-4B-Q4_K_M.gguf").write_bytes(gguf(llama(), TENSORS))
    assert locate_model("qwen3:4b").name == "qwen3-4b"


def broken(folder: Path, name: str) -> str:
    """Create a broken model in `folder`, and return what the error must say."""
    path = folder / "m"
    if name == "missing":
        return "no such file"
    if name.endswith(".gguf"):
        path = folder / "m.gguf"
        path.write_bytes(b"nothing" if name == "text.gguf" else gguf(llama(), TENSORS)[:-64])
        return "not a GGUF" if name == "text.gguf" else "cut off"
    make_folder(path)
    if name == "shards":
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return "lacks 2 of its weight files"
    (path / name).unlink()
    if name == "tokenizer.json":
        (path / "tokenizer.model").write_bytes(b"")
    return {"config.json": "no config.json", "tokenizer.json": "save_pretrained", "model.safetensors": "no weights"}[
        name
    ]


@pytest.mark.parametrize(
    "name", ["missing", "text.gguf", "cut.gguf", "config.json", "tokenizer.json", "model.safetensors", "shards"]
)
def test_locate_reports_broken_model_in_one_line(tmp_path: Path, name: str) -> None:
    message = broken(tmp_path, name)
    with pytest.raises(ModelError, match=message) as caught:
        locate_model(str(tmp_path / ("m.gguf" if name.endswith(".gguf") else "m")))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-at-all/x", f"{'a' * 300}/b", f"a/{'b' * 4000}", "a\0b", "é/é"])
def test_locate_reports_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        locate_model(name)
    assert not can_pull(name)


@pytest.mark.usefixtures("pulled")
def test_known_models_lists_present_and_broken_models(empty_home: Path) -> None:
    (empty_home / "models" / "tiny.gguf").write_bytes(gguf(llama(), TENSORS))
    (empty_home / "models" / "bad.gguf").write_bytes(b"")
    default, bad, tiny = known_models()
    assert (default.name, default.present, default.architecture, default.size) == (
        DEFAULT_MODEL,
        True,
        "llama",
        98362432,
    )
    assert (tiny.name, tiny.present, tiny.architecture) == ("tiny", True, "llama")
    assert (bad.name, bad.present) == ("bad", False)
    assert locate_model("tiny").path == tiny.path


@pytest.mark.usefixtures("no_wheel")
def test_known_models_lists_default_model_that_is_not_pulled() -> None:
    assert [(model.name, model.present) for model in known_models()] == [(DEFAULT_MODEL, False)]


@pytest.mark.usefixtures("pulled")
def test_modelfiles_import_no_heavy_packages() -> None:
    code = (
        "import sys, syringa.modelfiles, syringa.output.stop_strings;"
        "import syringa.prompt.tokens.tokenizer, syringa.prompt.chat.template;"
        "from syringa.modelfiles import *; load_tokenizer(locate('default'));"
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
