"""The command `parallel-core checkpoint`: what it says of checkpoints, and what it makes of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import parallel_core
from parallel_core import DistributedConfig
from parallel_core.checkpoint.consolidating import consolidate
from parallel_core.checkpoint.manifest import Manifest, Origin, Piece, SavedFile, SavedTensor, Section, write_manifest
from parallel_core.checkpoint.opening import hash_of, open_saved
from parallel_core.checkpoint.safetensors_format import SIZES
from parallel_core.checkpoint.writing import TensorFile
from parallel_core.cli import main
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, differences

CONFIGS = {
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=30),
}
NAMES = ("a/b", "ü", "new\nline", " ", "\x1b[31m", "[bold]")


class Odd(nn.Module):
    """Buffers of every dtype that can be saved, with odd names, without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        generator = torch.Generator().manual_seed(0)
        for name, size in SIZES.items():
            data = torch.randint(0, 2 if name == "bool" else 60, (15 * size,), dtype=torch.uint8, generator=generator)
            self.register_buffer(f"of {name}", data.view(getattr(torch, name)).view(3, 5))
        for index, name in enumerate(NAMES):
            self.register_buffer(name, torch.randn(2, index + 1, generator=generator))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("empty", torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


def save_all(folder: Path) -> None:
    for strategy in CONFIGS:
        save(strategy, folder)


def save(strategy: str, folder: Path) -> None:
    """Train a model with tied weights for two steps, and save it as both kinds with all that can be saved."""
    run = Run("language_model", CONFIGS[strategy], seed=5)
    run.train(range(2))
    assert run.optimizer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    for kind in KINDS:
        parallel_core.save_checkpoint(
            folder / f"{strategy}-{kind}",
            run.model,
            run.optimizer,
            state_dict_type=kind,
            extra={"step": 2, "best": (1, 2.5)},
            objects={"scheduler": scheduler},
            random_state=True,
        )
    if strategy == "fsdp2":
        odd = parallel_core.wrap_model_for_training(Odd(), CONFIGS[strategy])
        assert odd is not None
        for kind in KINDS:
            parallel_core.save_checkpoint(folder / f"odd-{kind}", odd, state_dict_type=kind)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, to be read alone: `ddp-full`, `ddp-sharded`, ..., `odd-sharded`."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(save_all, folder)
    return folder


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `parallel-core checkpoint`: returns the exit code, what stands on stdout, and what on stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, "\n".join(re.sub(" {2,}", "  ", line).rstrip() for line in out.splitlines()), err

    return run


def copied(source: Path, target: Path) -> Path:
    """Copy a checkpoint, to damage the copy."""
    return Path(shutil.copytree(source, target))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file but the manifest, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


class Values(nn.Module):
    """A model of given tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def save_values(path: Path, *, extra: Any = None, checksum: Any = True, **tensors: Any) -> Path:
    """Save a bare model of given tensors, in this process."""
    parallel_core.save_checkpoint(path, Values(**tensors), extra=extra, checksum=checksum)
    return path


# inspect


def test_inspect_shows_where_a_checkpoint_is_from_and_all_that_is_in_it(
    saved: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = command("inspect", saved / "fsdp-sharded")
    assert (code, err) == (0, "")
    for line in (
        "kind  sharded checkpoint",
        "saved by  'fsdp' (parallel-core-fsdp 0.1.0), 2 ranks",
        "  fsdp_auto_wrap_min_params = 50",
        "model  6 tensors, 246 elements, 984 bytes, float32",
        "tied  'embedding.weight' = 'head.weight'",
        "optimizer  AdamW: 18 tensors, 498 elements, 2.0 kB, float32",
        "objects  'scheduler'",
        "random states  of 2 ranks",
        "extra  {'step': 2, 'best': (1, 2.5)}",
        "embedding.weight  1  float32  [13, 6]  312 bytes  2",
        "exp_avg  6  float32  984 bytes",
    ):
        assert line in out.splitlines()
    assert re.search(r"^saved at  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", out, re.MULTILINE)
    assert re.search(r"^versions  parallel_core .*, torch .*, python ", out, re.MULTILINE)
    assert re.search(r"^model-rank-00001-of-00002.safetensors  1  \d+ bytes  [0-9a-f]{12}$", out, re.MULTILINE)
    assert re.search(r"^0  6  lr=0.01, betas=\(0.9, 0.999\), eps=1e-08", out, re.MULTILINE)
    assert "fsdp2_" not in out  # settings of another strategy, which counted for nothing
    assert "embedding.weight/exp_avg" not in out


def test_inspect_all_has_a_line_for_each_setting_and_tensor(
    saved: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    _, out, _ = command("inspect", saved / "fsdp-sharded", "--all")
    assert "embedding.weight/exp_avg  1  float32  [13, 6]  312 bytes  2" in out.splitlines()
    assert '  fsdp2_sharding = "full"' in out.splitlines()


def test_inspect_shows_names_that_would_command_the_terminal_as_text(
    saved: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    _, out, _ = command("inspect", saved / "odd-full", "--all")
    assert "\x1b" not in out
    for name in ("a/b", "ü", r"new\nline", "' '", r"\x1b[31m", "[bold]"):
        assert f"\n{name}  1  float32  [2, " in out
    assert "\nscalar  1  int64  []  8 bytes  1\nempty  1  float32  [0, 4]  0 bytes  1\n" in out
    assert "\nof complex128  1  complex128  [3, 5]  240 bytes  1\n" in out


def test_inspect_puts_many_tensors_and_files_that_are_alike_into_one_line(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    tensors = {
        f"layers.{layer}.{name}": SavedTensor("bfloat16", shape, pieces=(Piece(layer, (0,) * len(shape), shape),))
        for layer in range(100)
        for name, shape in {"weight": (64, 32), "bias": (64,), f"w{layer}": (1,)}.items()
    }
    files = tuple(SavedFile(f"model-rank-{index:05}-of-00100.safetensors", 10_000) for index in range(100))
    origin = Origin("'mine' (mine 1.0)")
    manifest = Manifest(
        state_dict_type="sharded", world_size=100, saved_at=0, origin=origin, files=files, model=Section(tensors)
    )
    write_manifest(tmp_path, manifest)
    _, out, _ = command("inspect", tmp_path)
    assert "model-rank-*-of-*.safetensors  100  1.0 MB" in out.splitlines()
    assert "layers.*.weight  100  bfloat16  [64, 32]  409.6 kB  1" in out.splitlines()
    assert "layers.7.w7  1  bfloat16  [1]  2 bytes  1" in out.splitlines()  # no number of a layer: the weights differ
    _, out, _ = command("inspect", tmp_path, "--all")
    assert "layers.7.weight  1  bfloat16  [64, 32]  4.1 kB  1" in out.splitlines()


def test_inspect_takes_weights_from_elsewhere(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    safetensors.torch.save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors", {"format": "pt", "by": "me"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        code, out, _ = command("inspect", path)
        assert code == 0
        assert "kind  weights without a manifest" in out
        assert re.search(r'^metadata of model.safetensors  \{.*"by": "me".*\}$', out, re.MULTILINE)
        assert "w  1  float32  [2, 3]  24 bytes  1" in out.splitlines()


def test_inspect_and_verify_need_no_torch(saved: Path) -> None:
    code = (
        "import sys; from parallel_core.cli import main; "
        "assert not any(main(['checkpoint', action, sys.argv[1]]) for action in ('inspect', 'verify')); "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, saved / "ddp-sharded"], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "False"


def test_what_goes_to_another_command_is_not_folded(saved: Path) -> None:
    names = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    run = subprocess.run(
        [sys.executable, "-m", "parallel_core.cli", "checkpoint", "inspect", saved / "fsdp-sharded"],
        capture_output=True,
        text=True,
        check=True,
        env=names,
    )
    assert re.search(r"^0 +6 +lr=0.01, .*, fused=None, .*initial_lr=0.01$", run.stdout, re.MULTILINE)


# verify


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "its content is not what was saved": flip,
    r"it has \d+ bytes, and was saved with \d+": truncate,
    "it can't be read: No such file or directory": Path.unlink,
}


def test_verify_finds_nothing_wrong_with_what_was_saved(
    saved: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    for path in sorted(saved.iterdir()):
        code, out, err = command("verify", path)
        assert (code, err) == (0, "")
        assert out == f"{path}: {len(list(path.iterdir()))} files, none damaged"


@pytest.mark.parametrize("reason", DAMAGES)
def test_verify_names_a_damaged_file_and_why(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]], reason: str
) -> None:
    bad = copied(saved / "fsdp-sharded", tmp_path / "bad")
    DAMAGES[reason](bad / "optimizer-rank-00001-of-00002.safetensors")
    code, out, _ = command("verify", bad)
    assert code == 1
    header, line, last = out.splitlines()
    assert (header, last) == ("file  what is wrong", f"{bad}: 1 of 6 files damaged")
    assert re.fullmatch(rf"optimizer-rank-00001-of-00002\.safetensors  {reason}", line)


def test_verify_names_every_damaged_file(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    bad = copied(saved / "fsdp2-sharded", tmp_path / "bad")
    for path, damage in zip(sorted(bad.glob("*-rank-*")), DAMAGES.values(), strict=False):
        damage(path)
    flip(bad / "random-states.json")
    code, out, _ = command("verify", bad)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [
        "model-rank-00000-of-00002.safetensors",
        "model-rank-00001-of-00002.safetensors",
        "optimizer-rank-00000-of-00002.safetensors",
        "random-states.json",
    ]


def test_verify_names_a_damaged_manifest(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    bad = copied(saved / "ddp-full", tmp_path / "bad")
    flip(bad / "manifest.json")
    code, out, _ = command("verify", bad)
    assert code == 1
    assert "manifest.json  it is not as it was written, so there is nothing to compare the other files with" in out


def test_verify_compares_headers_where_there_are_no_hashes(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    path = save_values(tmp_path / "a", checksum=False, weight=torch.ones(2))
    code, out, _ = command("verify", path)
    assert code == 0
    assert "without a hash: 1 file; a change that leaves the size and the header as they were can't be seen" in out
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"weight"', b'"height"'))
    code, out, _ = command("verify", path)
    assert code == 1
    assert f"{file.name}  the manifest has F32[2] in it for 'weight', and it lacks it" in out


def test_verify_looks_whether_weights_from_elsewhere_are_whole(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    for name in "ab":
        safetensors.torch.save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}')
    code, out, _ = command("verify", tmp_path)
    assert (code, out.splitlines()[0]) == (0, f"{tmp_path}: 2 files, none damaged")
    truncate(tmp_path / "a.safetensors")
    index.write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}}')
    code, out, _ = command("verify", tmp_path)
    assert code == 1
    assert re.search(r"a\.safetensors  .*: not a whole file", out)
    assert "b.safetensors  the index has 'c' in it, and it lacks it" in out
    index.write_text("{")
    code, out, _ = command("verify", tmp_path)
    assert code == 1
    assert "model.safetensors.index.json  " in out


def test_a_folder_in_the_place_of_weights_is_told(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "model.safetensors").mkdir()
    code, out, _ = command("verify", tmp_path)
    assert code == 1
    assert "model.safetensors can't be read: Is a directory" in out


def test_a_manifest_whose_pieces_leave_something_out_is_refused(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """Its own digest is right: what is left out would be loaded from memory that nobody has written."""
    tensor = SavedTensor("float32", (4,), pieces=(Piece(0, (0,), (1,)), Piece(0, (2,), (2,))))
    manifest = Manifest(
        state_dict_type="sharded",
        world_size=1,
        saved_at=0,
        origin=Origin("mine"),
        files=(SavedFile("model.safetensors", 100),),
        model=Section({"weight": tensor}),
    )
    write_manifest(tmp_path, manifest)
    code, _, err = command("verify", tmp_path)
    assert code == 2
    assert "'weight' is float32[4], and its pieces have 3 elements" in err


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_exit_code_2(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], action: str
) -> None:
    (tmp_path / "text").write_text("hello")
    for path, reason in ((tmp_path, "it lacks manifest.json"), (tmp_path / "nope", "there is no such folder")):
        code, out, err = command(action, path)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {path} is no complete checkpoint: ")
        assert reason in err


NEEDING_A_CHECKPOINT = (
    ["inspect", "{}"],
    ["verify", "{}"],
    ["diff", "{}", "{}"],
    ["consolidate", "{}", "target"],
)


@pytest.mark.parametrize("arguments", [*NEEDING_A_CHECKPOINT, ["consolidate", "nope", "{}/target"]], ids=" ".join)
@pytest.mark.parametrize("name", ["a" * 300, f"{'a' * 300}/step-1", "/".join(["a" * 200] * 30)], ids=len)
def test_a_name_that_is_too_long_is_exit_code_2(
    arguments: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*(argument.format(name) for argument in arguments))
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: {tmp_path}/{name}(/target)? can't be (read|written): File name too long\n", err)


@pytest.mark.parametrize("arguments", NEEDING_A_CHECKPOINT, ids=" ".join)
def test_a_checkpoint_that_may_not_be_looked_at_is_exit_code_2(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    secret, stat = tmp_path / "secret", Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if path.is_relative_to(secret):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "stat", refuse)
    code, out, err = command(*(argument.format(secret) for argument in arguments))
    assert (code, out, err) == (2, "", f"error: {secret} can't be read: Permission denied\n")


def test_progress_is_shown_on_a_terminal_alone(
    saved: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("verify", saved / "ddp-full")[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what it prints to for a terminal
    assert "comparing" in command("verify", saved / "ddp-full")[2]


# consolidate


@pytest.mark.parametrize("strategy", [*CONFIGS, "odd"])
def test_consolidate_writes_the_files_that_a_full_save_writes(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]], strategy: str
) -> None:
    source, target = saved / f"{strategy}-sharded", tmp_path / "full"
    before, expected = open_saved(source).manifest, open_saved(saved / f"{strategy}-full").manifest
    if strategy == "fsdp":  # runs of elements, which are no boxes of the tensor
        pieces = {len(piece.offsets) for piece in before.model.tensors["embedding.weight"].pieces}
        assert pieces == {1}
    code, out, err = command("consolidate", source, target)
    assert (code, err) == (0, "")
    assert out.startswith(f"wrote {target}: a full checkpoint, ")
    assert contents(target) == contents(saved / f"{strategy}-full")
    after = open_saved(target).manifest
    assert (after.model, after.optimizer, after.objects) == (expected.model, expected.optimizer, expected.objects)
    assert (after.extra, after.tied, after.files) == (expected.extra, expected.tied, expected.files)
    assert (after.origin, after.world_size, after.saved_at) == (before.origin, before.world_size, before.saved_at)
    assert command("diff", source, target)[0] == 0
    assert command("verify", target)[0] == 0


def test_what_was_consolidated_loads_and_opens_with_safetensors(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    command("consolidate", saved / "fsdp-sharded", tmp_path / "full")
    found = []
    for path in (saved / "fsdp-sharded", tmp_path / "full"):
        run = Run("language_model", None, seed=8)
        assert run.optimizer is not None
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 9)
        loaded = parallel_core.load_checkpoint(path, run.model, run.optimizer, objects={"scheduler": scheduler})
        assert loaded.extra == {"step": 2, "best": (1, 2.5)}
        state = parallel_core.optimizer_state_dict(run.model, run.optimizer)
        found.append({"model": run.full(), "optimizer": state, "scheduler": scheduler.state_dict()})
    assert differences(found[1], found[0]) == []
    tensors = safetensors.torch.load_file(tmp_path / "full" / "model.safetensors")
    weights = found[0]["model"]
    assert differences(tensors, {name: weights[name] for name in tensors}, where="[[") == []
    run = Run("language_model", None, seed=8)
    safetensors.torch.load_model(run.model, tmp_path / "full" / "model.safetensors")
    assert differences(run.full(), weights) == []


def test_consolidate_into_16_bits_and_several_files(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    target = tmp_path / "full"
    code, _, _ = command("consolidate", saved / "fsdp2-sharded", target, "--dtype", "bf16", "--max-file-size", "0.4kB")
    assert code == 0
    model = open_saved(saved / "fsdp2-full")
    weights = safetensors.torch.load_file(model.folder / "model.safetensors")
    found: dict[str, Tensor] = {}
    files = sorted(target.glob("model-*-of-00002.safetensors"))
    assert len(files) == 2
    for path in files:
        found |= safetensors.torch.load_file(path)
    assert differences(found, {name: weights[name].to(torch.bfloat16) for name in found}, where="[[") == []
    assert found.keys() == weights.keys()
    for path in (target / "model.safetensors.index.json", target / "manifest.json"):
        assert path.is_file()
    manifest = open_saved(target).manifest
    assert manifest.optimizer is not None
    assert {tensor.dtype for tensor in manifest.optimizer.tensors.values()} == {"float32"}
    assert command("verify", target)[0] == 0
    run = Run("language_model", None, seed=8)
    parallel_core.load_checkpoint(target, run.model, run.optimizer, cast=True)
    (target / "manifest.json").unlink()  # as another tool would see it
    parallel_core.load_checkpoint(target, run.model, cast=True)


def test_a_dtype_is_for_what_is_of_floating_point(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    assert command("consolidate", saved / "odd-sharded", tmp_path / "full", "--dtype", "bf16")[0] == 0
    found = open_saved(tmp_path / "full").manifest.model.tensors
    kept = {name for name in SIZES if found[f"of {name}"].dtype == name}
    assert kept == {name for name in SIZES if "float" not in name} | {"bfloat16"}
    assert {found[f"of {name}"].dtype for name in SIZES if "float" in name} == {"bfloat16"}


def test_a_number_that_a_dtype_has_no_room_for_is_an_error(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    source = save_values(tmp_path / "a", weight=torch.tensor([1.0, float("inf"), 1e6]))
    code, _, err = command("consolidate", source, tmp_path / "b", "--dtype", "fp16")
    assert code == 2
    assert err == "error: 'weight' has 1e+06, and float16 goes from -65504 to 65504; choose another dtype\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert command("consolidate", source, tmp_path / "b", "--dtype", "bf16")[0] == 0


def test_consolidate_looks_at_the_source_first(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    bad = copied(saved / "ddp-sharded", tmp_path / "bad")
    names = [path.name for path in sorted(bad.glob("*.safetensors"))]
    flip(bad / names[0])
    truncate(bad / names[1])
    code, _, err = command("consolidate", bad, tmp_path / "full")
    assert code == 2
    assert err.startswith(f"error: {bad} is damaged; use another checkpoint:\n  - {names[0]}: its content is not what")
    assert f"\n  - {names[1]}: it has " in err
    code, _, err = command("consolidate", bad, tmp_path / "full", "--no-verify")  # sizes are looked at all the same
    assert (code, names[1] in err) == (2, True)
    shutil.copy(saved / "ddp-sharded" / names[1], bad)
    assert command("consolidate", bad, tmp_path / "full", "--no-verify")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "full"]


class Counting(nn.Module):
    """A module with an extra state, and an object with a state, that have a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen = torch.tensor([1 / 3])

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "unit": "tokens"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_extra_states_and_objects_keep_their_dtype(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    model, average = Counting(), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    parallel_core.save_checkpoint(tmp_path / "a", model, objects={"average": average})
    assert command("consolidate", tmp_path / "a", tmp_path / "b", "--dtype", "bf16")[0] == 0
    other, other_average = Counting(), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    other.seen = torch.zeros(1)
    parallel_core.load_checkpoint(tmp_path / "b", other, objects={"average": other_average}, cast=True)
    assert other.seen.item() == model.seen.item()
    assert torch.equal(other.linear.weight, model.linear.weight.bfloat16().float())
    assert differences(other_average.state_dict(), average.state_dict()) == []
    assert (tmp_path / "b" / "objects.safetensors").is_file()
    _, out, _ = command("inspect", tmp_path / "b")
    assert "tensors of the objects" in out
    code, out, _ = command("diff", tmp_path / "a", tmp_path / "b")
    assert (code, "2 of 6 tensors with differences" in out) == (1, True)


def test_consolidate_replaces_a_checkpoint_and_nothing_else(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    source = copied(saved / "ddp-sharded", tmp_path / "source")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    (tmp_path / "file").write_text("keep")
    (tmp_path / "link").symlink_to(source)
    for target, reason in (
        (tmp_path / "mine", "is no checkpoint: it lacks manifest.json; move it away, or choose another name"),
        (tmp_path / "file", "is there and is no folder; choose another name"),
        (tmp_path / "link", "is there and is no folder; choose another name"),
        (source, "overlap; choose a folder apart from it"),
        (source / "inside", "overlap; choose a folder apart from it"),
        (tmp_path / "link" / "inside", "overlap; choose a folder apart from it"),
        (tmp_path / ".hidden", "choose a name without a leading dot"),
    ):
        code, _, err = command("consolidate", source, target)
        assert code == 2
        assert reason in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "mine", "source"]
    assert contents(source) == contents(saved / "ddp-sharded")
    save_values(tmp_path / "old", weight=torch.ones(1))
    assert command("consolidate", source, tmp_path / "old")[0] == 0
    assert contents(tmp_path / "old") == contents(saved / "ddp-full")


def test_consolidate_refuses_weights_from_elsewhere(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = command("consolidate", saved / "ddp-full" / "model.safetensors", tmp_path / "full")
    assert code == 2
    assert "is no checkpoint: its weights have no manifest, and are whole" in err


def test_consolidate_reads_a_checkpoint_whose_replacement_was_cut_off(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    copied(saved / "ddp-sharded", tmp_path / ".a.replaced-0123abcd")
    assert command("consolidate", tmp_path / "a", tmp_path / "full")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "full"]


def test_an_interruption_leaves_nothing_and_what_stood_there_before(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_values(tmp_path / "old", weight=torch.ones(1))
    before = contents(target)
    finish = TensorFile.finish

    def interrupted(self: TensorFile) -> SavedFile:
        finish(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorFile, "finish", interrupted)
    for path in (target, tmp_path / "new"):
        assert command("consolidate", saved / "ddp-sharded", path) == (130, "", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert contents(target) == before


@pytest.mark.parametrize("size", ["5 apples", "0", "-1", "0.1B", "GB", ""])
def test_a_size_that_is_none_is_wrong_usage(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["checkpoint", "consolidate", str(tmp_path), str(tmp_path / "b"), f"--max-file-size={size}"])
    assert stopped.value.code == 2
    assert f"expected a number of bytes, with a unit of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB: found {size!r}" in (
        capsys.readouterr().err
    )


def test_consolidate_holds_a_small_part_of_the_model(tmp_path: Path) -> None:
    """At most 15 % of the model's bytes, as the kernel counts the memory of this process."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        pytest.skip("only Linux tells of the most memory that a process has had since a moment")

    def peak() -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])

    source = save_values(tmp_path / "a", **{f"of_{index}": torch.ones(2**22) for index in range(4)})  # 64 MiB
    small = save_values(tmp_path / "small", weight=torch.ones(1))
    for number, dtype in enumerate((None, torch.bfloat16)):
        consolidate(small, tmp_path / "warm", dtype=dtype)  # what code takes has been taken
        clear.write_text("5")
        before = peak()
        consolidate(source, tmp_path / f"full-{number}", dtype=dtype)
        assert peak() - before < 0.15 * 64 * 1024
    assert hash_of(tmp_path / "full-0" / "model.safetensors") == hash_of(
        source / "model-rank-00000-of-00001.safetensors"
    )


# diff


def test_diff_finds_the_same_bits_however_they_are_cut_and_whoever_saved_them(
    saved: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    for one, other in (("fsdp-sharded", "ddp-full"), ("fsdp2-sharded", "fsdp-sharded"), ("odd-full", "odd-sharded")):
        code, out, err = command("diff", saved / one, saved / other)
        assert (code, err) == (0, "")
        assert re.fullmatch(r"the same bits: \d+ tensors, and all values", out)


def test_diff_lists_tensors_the_largest_difference_first(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    nan = float("nan")
    one = save_values(
        tmp_path / "a",
        same=torch.tensor([nan, float("inf"), 1.0]),
        near=torch.tensor([1.0, 2.0, nan]),
        far=torch.tensor([1, 2]),
        zero=torch.zeros(3),
        new_nan=torch.ones(2),
        gone=torch.ones(2),
        shape=torch.ones(2, 3),
        dtype=torch.tensor([1.0, 1.001]),
    )
    other = save_values(
        tmp_path / "b",
        same=torch.tensor([nan, float("inf"), 1.0]),
        near=torch.tensor([1.0, 2.5, nan]),
        far=torch.tensor([1, 9]),
        zero=-torch.zeros(3),
        new_nan=torch.tensor([1.0, nan]),
        shape=torch.ones(3, 2),
        dtype=torch.tensor([1.0, 1.0], dtype=torch.bfloat16),
        added=torch.tensor(True),
    )
    code, out, _ = command("diff", one, other)
    assert code == 1
    assert out.splitlines() == [
        "",
        "8 of 9 tensors with differences",
        f"part  tensor  {one}  {other}  largest difference  elements that differ",
        "model  gone  float32[2]  none",
        "model  shape  float32[2, 3]  float32[3, 2]",
        "model  added  none  bool[]",
        "model  new_nan  float32[2]  float32[2]  nan  1 of 2",
        "model  far  int64[2]  int64[2]  7  1 of 2",
        "model  near  float32[3]  float32[3]  0.5  1 of 3",
        "model  dtype  float32[2]  bfloat16[2]  0.00100005  1 of 2",
        "model  zero  float32[3]  float32[3]  0  3 of 3",
    ]


def test_diff_lists_values_and_the_optimizers_tensors(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    for index, name in enumerate("ab"):
        run = Run("blocks", None, seed=5, make_optimizer=lambda found: torch.optim.AdamW(found, lr=0.01))
        assert run.optimizer is not None
        run.train(range(1))
        moments = run.optimizer.state[next(iter(run.model.parameters()))]["exp_avg"]
        moments[0] += index
        run.optimizer.param_groups[0]["betas"] = (0.9, 0.999 - index / 2)
        extra = {"step": [1, True, 0.0, float("nan")], "at b": 1} if index else {"step": [1, 1, -0.0, float("nan")]}
        parallel_core.save_checkpoint(tmp_path / name, run.model, run.optimizer, extra=extra)
    code, out, _ = command("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    lines = out.splitlines()
    assert "1 of 40 tensors with differences" in lines
    assert "optimizer  blocks.0.norm.weight/exp_avg  float32[6]  float32[6]  1  1 of 6" in lines
    assert lines[-5:] == [
        f"value  {tmp_path / 'a'}  {tmp_path / 'b'}",
        "optimizer.param_groups[0].betas[1]  0.999  0.499",
        "extra.step[1]  1  True",
        "extra.step[2]  -0.0  0.0",
        "extra['at b']  none  1",
    ]
    code, out, _ = command("diff", tmp_path / "a", tmp_path / "b", "--model-only")
    assert (code, out) == (0, "the same bits: 10 tensors")


def test_diff_of_a_checkpoint_and_its_weights_alone(saved: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    paths = (saved / "fsdp-sharded", saved / "ddp-full" / "model.safetensors")
    code, out, _ = command("diff", *paths)
    assert code == 1
    assert "optimizer  AdamW  none" in out.splitlines()
    assert "4 values with differences" in out.splitlines()
    assert "embedding.weight" not in out  # that there is no optimizer is said once
    assert command("diff", *paths, "--model-only")[:2] == (0, "the same bits: 6 tensors")


def test_diff_shows_some_and_all_when_asked(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    one, other = (
        save_values(tmp_path / name, extra="x" * 300 + name, **{f"w{i}": torch.ones(1) * value for i in range(30)})
        for name, value in (("a", 1), ("b", 2))
    )
    _, out, _ = command("diff", one, other)
    assert len(re.findall(r"^model  w", out, re.MULTILINE)) == 20
    assert "and 10 more: --all shows them" in out
    assert "... (303 characters)" in out
    _, out, _ = command("diff", one, other, "--all")
    assert len(re.findall(r"^model  w", out, re.MULTILINE)) == 30
    assert "characters)" not in out


def test_diff_reads_a_bounded_part_at_a_time(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Where a tensor is longer than a part, the largest difference is that of all parts."""
    values = torch.zeros(3 * 2**20)
    one = save_values(tmp_path / "a", weight=values)
    values[5], values[-1] = 2, 1
    other = save_values(tmp_path / "b", weight=values)
    assert "2  2 of 3145728" in command("diff", one, other)[1]


def test_diff_is_exit_code_2_where_there_is_nothing_to_compare(
    saved: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    assert command("diff", saved / "ddp-full", tmp_path / "nope")[0] == 2
    bad = copied(saved / "ddp-full", tmp_path / "bad")
    truncate(bad / "model.safetensors")
    code, _, err = command("diff", saved / "ddp-full", bad)
    assert code == 2
    assert "model.safetensors is damaged: it has " in err


def test_verify_wants_the_folder_and_no_file_in_it(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    place = save_values(tmp_path / "a", weight=torch.ones(2))
    code, _, error = command("verify", place / "manifest.json")
    assert code == 2
    assert error == (
        f"error: {place / 'manifest.json'} is a file, expected a checkpoint's folder or a .safetensors file\n"
    )
