from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from syringa.errors import ModelError
from syringa.modelfiles import count_weights, describe, known_models, locate
from syringa.modelfiles import hub as hub_module
from syringa.modelfiles import pull as pull_model
from syringa.modelfiles.download import RemoteFile
from syringa.modelfiles.remove import remove

from .fake_hub import FakeHub, fake_hub, sha256
from .gguf_builder import TENSORS, gguf, llama

MODEL = gguf(llama(), TENSORS)
assert len(MODEL) > 1024
GGUF_FILES = {
    "README.md": b"#",
    "model-Q4_K_M.gguf": MODEL,
    "model-Q8_0.gguf": MODEL + bytes(64),
    "mmproj-model-f16.gguf": b"GGUF",
}
FOLDER_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": bytes(5000),
    "consolidated.safetensors": bytes(5000),
    "pytorch_model.bin": bytes(2000),
    "original/params.json": b"{}",
    "onnx/model.safetensors": bytes(100),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_module.download, "__defaults__", (lambda seconds: None,))  # no waiting between attempts
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories["org/model-GGUF"] = dict(GGUF_FILES)
        server.repositories["org/folder"] = dict(FOLDER_FILES)
        yield server


@pytest.mark.parametrize("name", ["org/model-GGUF:Q8_0", "org/model-GGUF:q8_0", "org/model-GGUF/model-Q8_0.gguf"])
def test_pull_fetches_only_the_named_variant(hub: FakeHub, name: str) -> None:
    files = pull_model(name)
    assert Path(files.path).read_bytes() == GGUF_FILES["model-Q8_0.gguf"]
    assert (files.name, files.kind) == (name, "gguf")
    assert hub.fetched() == {"model-Q8_0.gguf"}
    hub.requests.clear()
    assert pull_model(name) == files  # already present
    assert hub.requests == []


@pytest.mark.parametrize("tower", ["X.mmproj-Q8_0.gguf", "X-MMPROJ.Q8_0.gguf", "mmproj-X-Q8_0.gguf"])
def test_pull_does_not_take_a_vision_tower_for_the_model(hub: FakeHub, tower: str) -> None:
    hub.repositories["org/X"] = {"X.Q8_0.gguf": MODEL, tower: MODEL + bytes(64)}
    assert Path(pull_model("org/X:Q8_0").path).name == "X.Q8_0.gguf"
    assert hub.fetched() == {"X.Q8_0.gguf"}


@pytest.mark.parametrize("matrix", ["X-imatrix.gguf", "imatrix_unsloth.gguf", "X.imatrix.gguf"])
def test_pull_does_not_take_an_importance_matrix_for_a_model(hub: FakeHub, matrix: str) -> None:
    hub.repositories["org/X"] = {"X.Q5_1.gguf": MODEL, matrix: MODEL + bytes(64)}
    assert Path(pull_model("org/X").path).name == "X.Q5_1.gguf"
    hub.repositories["org/Y"] = {"Y.Q3_K.gguf": MODEL, "Y.Q2_K.gguf": MODEL, matrix: MODEL}
    with pytest.raises(ModelError, match="org/Y has several models: add one of Q2_K, Q3_K after a colon"):
        pull_model("org/Y")


def test_model_may_be_named_by_its_importance_matrix(hub: FakeHub) -> None:
    hub.repositories["org/X"] = {"X-imatrix-Q5_1.gguf": MODEL}
    assert Path(pull_model("org/X").path).name == "X-imatrix-Q5_1.gguf"


def test_pull_without_a_variant_prefers_q4_k_m(hub: FakeHub) -> None:
    assert Path(pull_model("org/model-GGUF").path).name == "model-Q4_K_M.gguf"
    assert [known.name for known in known_models() if known.present] == ["org/model-GGUF:Q4_K_M"]


def test_pull_fetches_only_what_a_folder_needs(hub: FakeHub) -> None:
    files = pull_model("org/folder")
    assert files.kind == "folder"
    assert hub.fetched() == {"config.json", "tokenizer.json", "model.safetensors"}


def test_pull_reports_progress_up_to_the_total_size(hub: FakeHub) -> None:
    seen: list[tuple[int, int]] = []
    pull_model("org/model-GGUF:Q4_K_M", lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, len(MODEL))
    assert seen[-1] == (len(MODEL), len(MODEL))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_pull_continues_after_each_cut_connection_where_it_ended(hub: FakeHub) -> None:
    hub.cut_after["model-Q4_K_M.gguf"] = [1] * 10 + [687, 2]  # more cuts than attempts without progress
    assert Path(pull_model("org/model-GGUF:Q4_K_M").path).read_bytes() == MODEL
    ranges = [wanted for method, _, wanted in hub.requests if method == "GET"][1:]
    assert ranges == [None, *(f"bytes={start}-" for start in (*range(1, 11), 697, 699))]


def test_interrupted_pull_resumes_in_the_next_one(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut_after["model-Q4_K_M.gguf"] = [500] + [0] * 20
    with pytest.raises(ModelError, match="pull it again to continue"):
        pull_model("org/model-GGUF:Q4_K_M")
    hub.cut_after.clear()
    hub.requests.clear()
    assert Path(pull_model("org/model-GGUF:Q4_K_M").path).read_bytes() == MODEL
    assert [range for method, path, range in hub.requests if path.endswith(".gguf") and method == "GET"] == [
        "bytes=500-"
    ]


@pytest.mark.parametrize(
    ("repository", "file"), [("org/model-GGUF:Q4_K_M", "model-Q4_K_M.gguf"), ("org/folder", "tokenizer.json")]
)
def test_wrong_checksum_is_deleted(hub: FakeHub, repository: str, file: str, tmp_path: Path) -> None:
    hub.corrupt.add(file)
    with pytest.raises(ModelError, match=rf"{file} of {repository} arrived with a wrong checksum and was deleted"):
        pull_model(repository)
    assert not list((tmp_path / "hub").rglob(file))
    hub.corrupt.clear()
    assert pull_model(repository)


def test_too_many_requests_are_tried_again(hub: FakeHub) -> None:
    hub.statuses = [429, 503]
    assert pull_model("org/model-GGUF:Q4_K_M")
    hub.statuses = [429] * 10
    with pytest.raises(ModelError, match="refuses more requests for now"):
        pull_model("org/model-GGUF:Q8_0")


@pytest.mark.parametrize(
    ("stated", "waited"), [("3", 3), ("0.5", 0.5), ("99999", 60), ("-1", 1), ("nan", 1), ("inf", 1), ("soon", 1)]
)
def test_retry_waits_for_the_stated_time_if_it_is_one(
    hub: FakeHub, stated: str, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hub_module.download, "__defaults__", (waits.append,))
    hub.statuses, hub.retry_after = [429], stated
    assert pull_model("org/model-GGUF:Q4_K_M")
    assert waits == [waited]


def test_file_is_fetched_by_one_process(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--org--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / f"{sha256(MODEL)}.syringa-part").open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="is being fetched by another process"):
            pull_model("org/model-GGUF:Q4_K_M")


def test_pull_continues_only_what_the_server_continues(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--org--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(MODEL)}.syringa-part").write_bytes(MODEL[:600])
    hub.ignores_ranges = True
    assert Path(pull_model("org/model-GGUF:Q4_K_M").path).read_bytes() == MODEL


@pytest.mark.parametrize("name", ["../../escape.gguf", "/etc/escape.gguf"])
def test_pull_refuses_names_outside_of_the_folder(hub: FakeHub, name: str) -> None:
    hub.repositories["org/model-GGUF"][name] = MODEL
    with pytest.raises(ModelError, match="leaves the folder"):
        pull_model("org/model-GGUF")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/missing", "org/missing is not on the Hugging Face Hub, or is private: set HF_TOKEN to read it$"),
        ("org/model-GGUF:Q2_K", "org/model-GGUF has no Q2_K; it has Q4_K_M, Q8_0"),
        ("org/model-GGUF:../x", "no such file"),
        ("no-such-model", "no such file"),
    ],
)
def test_pull_refuses_what_does_not_exist(hub: FakeHub, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        pull_model(model)
    assert "\n" not in raised.value.message


def test_pull_sends_the_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    refused = "the Hugging Face Hub refuses org/model-GGUF (401): it does not exist, or "
    with pytest.raises(ModelError) as raised:
        pull_model("org/model-GGUF")
    assert raised.value.message == refused + "needs a valid token in HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ModelError) as raised:
        pull_model("org/model-GGUF")
    assert raised.value.message == refused + "your access token is not valid for it"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull_model("org/model-GGUF")


def test_token_is_not_sent_to_the_storage_of_files(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    with fake_hub() as storage:
        storage.repositories, hub.storage = hub.repositories, storage.url
        storage.cut_after["model-Q4_K_M.gguf"] = [700]
        assert Path(pull_model("org/model-GGUF:Q4_K_M").path).read_bytes() == MODEL
        assert [wanted for _, _, wanted in storage.requests] == [None, "bytes=700-"]
        assert storage.authorizations == [None, None]
    assert hub.authorizations == ["Bearer hf_secret"] * 3


@pytest.mark.parametrize("redirected", [False, True])
def test_missing_file_is_not_taken_for_a_missing_repository(hub: FakeHub, redirected: bool) -> None:
    with fake_hub() as storage:
        if redirected:
            hub.storage = storage.url
        else:
            hub.missing.add("model-Q4_K_M.gguf")
        with pytest.raises(ModelError) as raised:
            pull_model("org/model-GGUF:Q4_K_M")
    assert raised.value.message == (
        "org/model-GGUF lists the file model-Q4_K_M.gguf, and the Hugging Face Hub does not have it: try again later"
    )


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_advice_to_set_a_token_is_given_without_one(
    hub: FakeHub, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    messages = []
    for model, statuses in (("org/missing", []), ("org/model-GGUF", [429] * 5), ("org/model-GGUF", [401])):
        hub.statuses = [*statuses]
        with pytest.raises(ModelError) as raised:
            pull_model(model)
        messages.append(raised.value.message)
    assert ["HF_TOKEN" in message for message in messages] == [token is None] * 3


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME", None])
def test_pull_sends_the_stored_token_wherever_the_cache_is(
    hub: FakeHub, variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "data" / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    value, file = {
        "HF_HOME": ("~/home", "home/token"),
        "HF_TOKEN_PATH": ("~/secrets/token", "secrets/token"),
        "XDG_CACHE_HOME": ("~/caches", "caches/huggingface/token"),
        None: ("", ".cache/huggingface/token"),
    }[variable]
    token = tmp_path / file
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    if variable is not None:
        monkeypatch.setenv(variable, value)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "token").write_text("another")  # beside the cache, where it is not
    hub.token = "hf_stored"
    with pytest.raises(ModelError, match="HF_TOKEN"):
        pull_model("org/model-GGUF")
    token.parent.mkdir(parents=True)
    token.write_text("hf_stored\n")
    assert pull_model("org/model-GGUF")


def test_gated_model_needs_a_token_of_an_account_that_accepted_its_terms(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated = "hf_accepted"  # the list of its files is public
    for token in ("", "hf_other"):
        monkeypatch.setenv("HF_TOKEN", token)
        advice = "with the account of your access token" if token else "and set HF_TOKEN to a token of your account"
        with pytest.raises(ModelError) as raised:
            pull_model("org/model-GGUF")
        assert raised.value.message == f"org/model-GGUF is gated: accept its terms on its page, {advice}"
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert pull_model("org/model-GGUF")


def test_refused_repository_is_one_line(hub: FakeHub) -> None:
    hub.statuses = [403]
    with pytest.raises(ModelError, match=r"the Hugging Face Hub refuses org/model-GGUF \(403\): it does not exist, or"):
        pull_model("org/model-GGUF")
    assert len(hub.requests) == 1
    hub.statuses = [418]
    with pytest.raises(ModelError, match="org/model-GGUF could not be fetched: the Hugging Face Hub responded with st"):
        pull_model("org/model-GGUF")


def split_gguf() -> list[bytes]:
    """Return a model of two parts, with half of the tensors in each."""
    names = list(TENSORS)
    parts = []
    for number, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        metadata = (llama() if number == 0 else {}) | {"split.no": number, "split.count": 2}
        metadata["split.tensors.count"] = len(names)
        parts.append(gguf(metadata, {name: TENSORS[name] for name in half}))
    return parts


def test_pull_fetches_all_parts_of_a_split_model(hub: FakeHub) -> None:
    parts = [f"Q8_0/model-Q8_0-{number:05}-of-00002.gguf" for number in (1, 2)]
    other = "Q4_0/model-Q4_0-00001-of-00002.gguf"
    hub.repositories["org/split"] = dict(zip(parts, split_gguf(), strict=True)) | {other: bytes(2000)}
    seen: list[tuple[int, int]] = []
    files = pull_model("org/split:Q8_0", lambda done, total: seen.append((done, total)))
    assert hub.fetched() == set(parts)
    assert files.path.endswith(parts[0])
    total = sum(len(hub.repositories["org/split"][part]) for part in parts)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    description = describe(files)
    assert description.architecture == "LlamaForCausalLM"
    assert count_weights(files) == sum(math.prod(shape) for shape in TENSORS.values())
    assert [known.name for known in known_models() if known.present] == ["org/split:Q8_0"]


def test_split_model_whose_download_was_interrupted_is_not_found(hub: FakeHub) -> None:
    parts = [f"model-Q8_0-{number:05}-of-00002.gguf" for number in (1, 2)]
    hub.repositories["org/split"] = dict(zip(parts, split_gguf(), strict=True))
    hub.cut_after[parts[1]] = [10] + [0] * 20
    with pytest.raises(ModelError, match="pull it again to continue"):
        pull_model("org/split")
    with pytest.raises(ModelError):
        locate("org/split")
    hub.cut_after.clear()
    hub.requests.clear()
    assert pull_model("org/split").path.endswith(parts[0])
    assert hub.fetched() == {parts[1]}


def test_pull_fetches_all_shards_of_a_folder(hub: FakeHub) -> None:
    shards = {f"model-0000{number}-of-00003.safetensors": bytes([number]) * 3000 for number in (1, 2, 3)}
    index = {"weight_map": {f"layer.{number}": shard for number, shard in enumerate(shards)}}
    hub.repositories["org/sharded"] = {
        "config.json": b"{}",
        "tokenizer.json": b"{ }",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "consolidated-00001-of-00001.safetensors": bytes(9000),  # the same weights in another layout
        **shards,
    }
    wanted = {*shards, "config.json", "tokenizer.json", "model.safetensors.index.json"}
    folder = Path(pull_model("org/sharded").path)
    assert hub.fetched() == {file.name for file in folder.iterdir()} == wanted
    for name, content in shards.items():
        assert (folder / name).read_bytes() == content
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of its weight files, model-00002-of-00003\.safetensors first"):
        locate("org/sharded")
    hub.requests.clear()
    assert pull_model("org/sharded").path == str(folder)
    assert hub.fetched() == set()  # its content is still in the cache


def test_pull_offline_asks_nothing(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="no copy in the Hugging Face cache"):
        pull_model("org/model-GGUF", offline=True)
    assert hub.requests == []


def set_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=free))


@pytest.mark.parametrize("here", [0, 600])
def test_pull_checks_the_disk_first(hub: FakeHub, here: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--org--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(MODEL)}.syringa-part").write_bytes(MODEL[:here])
    needed = (64 << 20) + len(MODEL) - here  # some of the disk stays free
    with monkeypatch.context() as patched:
        set_free_space(patched, needed - 1)
        with pytest.raises(ModelError, match=r"needs 0\.0 GB, and 0\.1 GB are free in .*HF_HOME"):
            pull_model("org/model-GGUF:Q4_K_M")
    assert hub.fetched() == set()
    set_free_space(monkeypatch, needed)
    assert pull_model("org/model-GGUF:Q4_K_M")


def test_disk_that_cannot_be_read_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("shutil.disk_usage", refuse)
    with pytest.raises(ModelError, match=r"^org/model-GGUF:Q4_K_M cannot be stored in .*: Permission denied$"):
        pull_model("org/model-GGUF:Q4_K_M")


@pytest.mark.parametrize(
    ("file", "advice"),
    [("vocab.json", "choose another repository"), ("tokenizer.model", "AutoTokenizer.from_pretrained")],
)
def test_pull_refuses_folder_without_tokenizer_before_it_fetches(hub: FakeHub, file: str, advice: str) -> None:
    repository = hub.repositories["org/folder"]
    repository[file] = repository.pop("tokenizer.json")
    with pytest.raises(ModelError, match=rf"^org/folder has no tokenizer\.json: .*{advice}"):
        pull_model("org/folder")
    assert hub.fetched() == set()


@pytest.fixture
def _no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without symbolic links, such as one with exFAT."""

    def refuse(self: Path, target: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)


@pytest.mark.usefixtures("_no_links")
def test_pull_stores_files_by_their_names_where_there_are_no_links(hub: FakeHub) -> None:
    hub.repositories["org/folder"]["generation_config.json"] = FOLDER_FILES["config.json"]  # the same content twice
    folder = Path(pull_model("org/folder").path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: FOLDER_FILES["config.json" if name == "generation_config.json" else name]
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }
    (folder / "tokenizer.json").unlink()
    hub.requests.clear()
    assert pull_model("org/folder").path == str(folder)
    assert hub.fetched() == {"tokenizer.json"}


@pytest.mark.usefixtures("_no_links")
def test_file_that_is_no_link_is_deleted_with_its_content(hub: FakeHub, tmp_path: Path) -> None:
    remove(pull_model("org/model-GGUF:Q4_K_M"))
    repository = tmp_path / "hub" / "models--org--model-GGUF"
    assert [file.name for file in repository.rglob("*") if file.is_file()] == ["main"]


def test_content_stays_where_it_is_when_a_link_cannot_be_made(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", fail)
        with pytest.raises(ModelError, match=r"cannot be stored in .*No space left"):
            pull_model("org/model-GGUF:Q4_K_M")
    blobs = tmp_path / "hub" / "models--org--model-GGUF" / "blobs"
    assert [file.stat().st_size > 0 for file in blobs.iterdir()] == [True]
    (snapshot,) = (blobs.parent / "snapshots").iterdir()
    for name in hub.repositories["org/model-GGUF"]:  # a process with the same id was killed
        (snapshot / f".{name}.{os.getpid()}").symlink_to("nowhere")
    assert Path(pull_model("org/model-GGUF:Q4_K_M").path).is_symlink()


def test_files_that_cannot_get_their_names_are_one_line(hub: FakeHub, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--model-GGUF"
    repository.mkdir(parents=True)
    (repository / "snapshots").touch()
    with pytest.raises(ModelError, match=r"org/model-GGUF:Q4_K_M cannot be stored in .*models--org--model-GGUF: "):
        pull_model("org/model-GGUF:Q4_K_M")


def test_unreachable_hub_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="org/model-GGUF could not be fetched: the connection failed"):
        pull_model("org/model-GGUF")


def test_locate_finds_variants_of_older_snapshots(hub: FakeHub, tmp_path: Path) -> None:
    pulled = pull_model("org/model-GGUF:Q4_K_M")
    repository = Path(pulled.path).parents[2]
    newer = repository / "snapshots" / "newer"
    newer.mkdir()
    (newer / "model-Q8_0.gguf").write_bytes(GGUF_FILES["model-Q8_0.gguf"])
    (repository / "refs" / "main").write_text("newer")
    assert locate("org/model-GGUF:Q4_K_M") == pulled
    assert Path(locate("org/model-GGUF").path).name == "model-Q8_0.gguf"


def test_download_that_is_ended_by_its_observer_is_continued_later(hub: FakeHub) -> None:
    seen: list[tuple[str, int]] = []

    def stop(file: RemoteFile, done: int) -> None:
        seen.append((file.checksum, done))
        if done >= 500:
            raise KeyboardInterrupt

    hub.cut_after["model-Q4_K_M.gguf"] = [100, 400]
    with pytest.raises(KeyboardInterrupt):
        pull_model("org/model-GGUF:Q4_K_M", on_file=stop)
    assert (sha256(MODEL), 100) in seen
    assert seen[-1] == (sha256(MODEL), 500)
    hub.requests.clear()
    pull_model("org/model-GGUF:Q4_K_M", on_file=lambda file, done: seen.append((file.checksum, done)))
    assert seen[-1] == (sha256(MODEL), len(MODEL))
    assert hub.requests[-1][2] == "bytes=500-"
